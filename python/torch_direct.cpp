#include "torch_direct.h"

#include <nanobind/stl/optional.h>

#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "calls.h"
#include "torch_ops.h"
#include "without_gil.h"

namespace fulgur::python {
namespace {

bool is_true(const nb::object& object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) throw nb::python_error();
  return truth != 0;
}

nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

/// Whether q has the shape and the strides of out.
bool is_as_out(const ForwardArgs& args) {
  const auto& [q, v] = std::tie(args.q, args.v);
  const std::span<const int64_t> shape(q.shape.data(), static_cast<size_t>(q.rank));
  return q.rank > 0 && v.rank > 0 && q.shape[q.rank - 1] == v.shape[v.rank - 1] &&
         q.strides == ConstTensor::contiguous(nullptr, q.dtype, shape, q.device).strides;
}

}  // namespace

TorchDirect::TorchDirect(nb::tuple seen_by, nb::tuple types, nb::object empty_like,
                         nb::object empty_out, nb::object empty_lse)
    : seen_by_(std::move(seen_by)),
      types_(std::move(types)),
      empty_like_(std::move(empty_like)),
      empty_out_(std::move(empty_out)),
      empty_lse_(std::move(empty_lse)),
      is_neg_(interned("is_neg")),
      requires_grad_(interned("requires_grad")),
      exchange_(exchange_api(types_[0])) {}

bool TorchDirect::has_to_be_seen() const {
  for (const nb::handle sees : seen_by_) {
    if (is_true(sees())) return true;
  }
  return false;
}

bool TorchDirect::is_plain(nb::handle tensor, bool grad) const {
  bool known = false;
  for (const nb::handle type : types_) known = known || tensor.type().is(type);
  return known && !(grad && is_true(tensor.attr(requires_grad_)));
}

Tensor TorchDirect::view(const char* name, nb::handle tensor) const {
  DLTensor view{};
  if (exchange_->tensor(tensor.ptr(), &view) != 0) throw nb::python_error();
  const Tensor t = Tensor::from_dlpack(view, name);
  // A negated view is one of complex numbers' imaginary parts, so that no two of them are adjacent.
  const bool adjacent = t.rank > 0 && t.shape[t.rank - 1] > 1 && t.strides[t.rank - 1] == 1;
  if (!adjacent && is_true(tensor.attr(is_neg_)())) throw nb::type_error("a negated view");
  return t;
}

nb::object TorchDirect::forward(nb::handle q, nb::handle k, nb::handle v, const nb::dict& tensors,
                                const nb::dict& options, bool with_lse) const {
  try {
    const bool grad = torch_grad_enabled();
    bool plain = is_plain(q, grad) && is_plain(k, grad) && is_plain(v, grad);
    for (const auto& [name, tensor] : tensors) plain = plain && is_plain(tensor, grad);
    if (!plain || has_to_be_seen()) return nb::none();

    ForwardArgs args;
    args.q = view("q", q);
    args.k = view("k", k);
    args.v = view("v", v);
    for (const auto& [name, tensor] : tensors) {
      const std::string_view wanted = nb::cast<const char*>(name);
      const auto read = [&](const TensorRule& rule, auto& t) {
        if (wanted == rule.name) t = view(rule.name, tensor);
      };
      for_each_tensor(read, args);
    }
    Options numbers;
    for (const auto& [name, number] : options) {
      const std::string_view wanted = nb::cast<const char*>(name);
      const auto read = [&]<class T>(const char* known, T& option) {
        if (wanted == known) option = nb::cast<T>(number);
      };
      for_each_option(read, numbers);
    }
    const nb::object out = is_as_out(args) ? empty_like_(q) : empty_out_(q, v);
    args.out = view("out", out);
    nb::object lse;
    if (with_lse) {
      lse = empty_lse_(q);
      args.lse = view("lse", lse);
    }
    {
      const WithoutGil unlocked;
      torch_forward(args, numbers);
    }
    return with_lse ? nb::make_tuple(out, lse) : out;
  } catch (const std::exception&) {
    return nb::none();
  }
}

}  // namespace fulgur::python
