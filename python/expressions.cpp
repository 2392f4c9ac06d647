#include "expressions.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "arrays.h"
#include "expression/term.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fulgur::python {

void register_expressions(nb::module_& m) {
  nb::class_<Expr>(m, "Expr")
      .def_static("symbol", [](const std::string& name) { return Expr::symbol(name); })
      .def_static("of_bool", [](bool value) { return Expr(value); })
      .def_static("of_int", [](int64_t value) { return Expr(value); })
      .def_static("of_float", [](double value) { return Expr(value); })
      .def_static("apply", [](const std::string& operation,
                              const std::vector<Expr>& x) { return Expr::apply(operation, x); })
      .def_prop_ro("type",
                   [](const Expr& e) { return expression::name_of(expression::type_of(e)); })
      .def("text", &Expr::text);
  nb::class_<TensorSymbol>(m, "TensorSymbol")
      .def("__init__",
           [](TensorSymbol* symbol, const std::string& name, const View& view) {
             new (symbol) TensorSymbol(name, view.tensor.dtype, view.tensor.rank);
           })
      .def("at", [](const TensorSymbol& symbol, const std::vector<Expr>& indices) {
        return symbol.at(indices);
      });
  m.def("parse_expression", [](const std::string& text, const std::vector<TensorSymbol>& tensors) {
    return parse_expression(text, tensors);
  });
}

Expr expression_of(nb::handle option) {
  return option.is_valid() && !option.is_none() ? nb::cast<Expr>(option) : Expr();
}

std::vector<TensorBinding> bindings_of(nb::handle tensors, nb::handle gradients) {
  std::vector<TensorBinding> bindings;
  if (!tensors.is_valid()) return bindings;
  for (const auto& [name, view] : nb::borrow<nb::dict>(tensors)) {
    bindings.push_back({nb::cast<std::string>(name), nb::cast<const View&>(view).tensor, {}});
  }
  // Runs name them in any order, and plans compare them in one.
  std::ranges::sort(bindings, {}, &TensorBinding::name);
  if (!gradients.is_valid()) return bindings;
  for (const auto& [name, view] : nb::borrow<nb::dict>(gradients)) {
    const auto its = nb::cast<std::string>(name);
    const auto at = std::ranges::find(bindings, its, &TensorBinding::name);
    if (at == bindings.end()) fail(its + ": got a gradient of a tensor that is not given");
    at->grad = nb::cast<const View&>(view).tensor;
  }
  return bindings;
}

}  // namespace fulgur::python
