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

std::string_view text_of(nb::handle name) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text == nullptr) throw nb::python_error();
  return {text, static_cast<size_t>(size)};
}

// Numbers of Python's own types alone: what a tensor or a symbol converts to is not all that it is.

[[noreturn]] void refuse(const char* name) { throw nb::type_error(name); }

void read(const char* name, nb::handle value, bool& to) {
  if (!PyBool_Check(value.ptr())) refuse(name);
  to = value.is(Py_True);
}
void read(const char* name, nb::handle value, int64_t& to) {
  if (!PyLong_CheckExact(value.ptr())) refuse(name);
  to = nb::cast<int64_t>(value);
}
void read(const char* name, nb::handle value, double& to) {
  if (!PyFloat_CheckExact(value.ptr()) && !PyLong_CheckExact(value.ptr())) refuse(name);
  to = nb::cast<double>(value);
}
void read(const char* name, nb::handle value, std::optional<double>& to) {
  read(name, value, to.emplace());
}

/// Reads an option; false where there is none with this name.
bool read_option(std::string_view name, nb::handle value, Options& options) {
  bool known = false;
  const auto visit = [&](const char* option, auto& to) {
    if (name != option) return;
    read(option, value, to);
    known = true;
  };
  for_each_option(visit, options);
  return known;
}

void read_window(nb::handle sides, Mask& mask) {
  if (!PyTuple_CheckExact(sides.ptr()) || PyTuple_Size(sides.ptr()) != 2) refuse("window");
  read("window", PyTuple_GetItem(sides.ptr(), 0), mask.left);
  read("window", PyTuple_GetItem(sides.ptr(), 1), mask.right);
}

/// What `compute` returns, None where it throws.
template <class Compute>
nb::object or_none(Compute&& compute) {
  try {
    return compute();
  } catch (const std::exception&) {
    return nb::none();
  }
}

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

bool TorchDirect::is_tensor(nb::handle object) const {
  bool known = false;
  for (const nb::handle type : types_) known = known || object.type().is(type);
  return known;
}

bool TorchDirect::is_recorded(nb::handle object) const {
  return torch_grad_enabled() && is_tensor(object) && is_true(object.attr(requires_grad_));
}

Tensor TorchDirect::view(const char* name, nb::handle tensor) const {
  if (!is_tensor(tensor) || is_recorded(tensor)) refuse(name);
  DLTensor view{};
  if (exchange_->tensor(tensor.ptr(), &view) != 0) throw nb::python_error();
  const Tensor t = Tensor::from_dlpack(view, name);
  // A negated view is one of complex numbers' imaginary parts, so that no two of them are adjacent.
  const bool adjacent = t.rank > 0 && t.shape[t.rank - 1] > 1 && t.strides[t.rank - 1] == 1;
  if (!adjacent && is_true(tensor.attr(is_neg_)())) throw nb::type_error("a negated view");
  return t;
}

bool TorchDirect::read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args) const {
  bool known = false;
  const auto visit = [&](const TensorRule& rule, auto& t) {
    if (rule.written() || rule.need != Need::kOptional || name != rule.name) return;
    t = view(rule.name, tensor);
    known = true;
  };
  for_each_tensor(visit, args);
  return known;
}

nb::object TorchDirect::attention(nb::handle q, nb::handle k, nb::handle v,
                                  const nb::dict& given) const {
  return or_none([&]() -> nb::object {
    // Without an exception, which takes a microsecond, where training comes by.
    if (is_recorded(q) || is_recorded(k) || is_recorded(v) || has_to_be_seen()) return nb::none();
    ForwardArgs args;
    Options options;
    bool causal = false, with_lse = false;
    for (const auto& [key, value] : given) {
      if (value.is_none()) continue;
      const std::string_view name = text_of(key);
      if (name == "causal") {
        read("causal", value, causal);
      } else if (name == "return_lse") {
        read("return_lse", value, with_lse);
      } else if (name == "window") {
        read_window(value, options.mask);
      } else if (name == "window_left" || name == "window_right" || name == "rng_state") {
        return nb::none();  // arguments of the operators alone
      } else if (!read_option(name, value, options) && !read_tensor(name, value, args)) {
        return nb::none();
      }
    }
    if (causal) options.mask.right = 0;
    if (options.dropout_p != 0) return nb::none();
    return compute(q, k, v, args, options, with_lse);
  });
}

nb::object TorchDirect::forward(nb::handle q, nb::handle k, nb::handle v, const nb::dict& tensors,
                                const nb::dict& options) const {
  return or_none([&]() -> nb::object {
    if (has_to_be_seen()) return nb::none();
    ForwardArgs args;
    Options numbers;
    for (const auto& [key, tensor] : tensors) {
      if (!read_tensor(text_of(key), tensor, args)) return nb::none();
    }
    for (const auto& [key, number] : options) {
      if (!read_option(text_of(key), number, numbers)) return nb::none();
    }
    return compute(q, k, v, args, numbers, true);
  });
}

nb::object TorchDirect::compute(nb::handle q, nb::handle k, nb::handle v, ForwardArgs& args,
                                Options& options, bool with_lse) const {
  args.q = view("q", q);
  args.k = view("k", k);
  args.v = view("v", v);
  const nb::object out = is_as_out(args) ? empty_like_(q) : empty_out_(q, v);
  args.out = view("out", out);
  nb::object lse;
  if (with_lse) {
    lse = empty_lse_(q);
    args.lse = view("lse", lse);
  }
  {
    const WithoutGil unlocked;
    torch_forward(args, options);
  }
  return with_lse ? nb::make_tuple(out, lse) : out;
}

}  // namespace fulgur::python
