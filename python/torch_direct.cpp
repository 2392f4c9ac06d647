#include "torch_direct.h"

#include <nanobind/stl/optional.h>

#include <string_view>
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
void read(const char* name, nb::handle value, uint64_t& to) {
  if (!PyLong_CheckExact(value.ptr())) refuse(name);
  to = nb::cast<uint64_t>(value);
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

}  // namespace

TorchTensors::TorchTensors(nb::tuple types)
    : types_(std::move(types)),
      is_neg_(interned("is_neg")),
      requires_grad_(interned("requires_grad")) {
  try {
    find_torch();
  } catch (const Error&) {
    return;  // an old one
  }
  if (makes_torch_objects()) exchange_ = exchange_api(types_[0]);
}

bool TorchTensors::is_one(nb::handle object) const {
  bool known = false;
  for (const nb::handle type : types_) known = known || object.type().is(type);
  return known;
}

bool TorchTensors::requires_grad(nb::handle tensor) const {
  return is_true(tensor.attr(requires_grad_));
}

Tensor TorchTensors::view(const char* name, nb::handle tensor) const {
  if (exchange_ == nullptr || !is_one(tensor)) refuse(name);
  DLTensor view{};
  if (exchange_->tensor(tensor.ptr(), &view) != 0) throw nb::python_error();
  const Tensor t = Tensor::from_dlpack(view, name);
  // A negated view is one of complex numbers' imaginary parts, so that no two of them are adjacent.
  const bool adjacent = t.rank > 0 && t.shape[t.rank - 1] > 1 && t.strides[t.rank - 1] == 1;
  if (!adjacent && is_true(tensor.attr(is_neg_)())) throw nb::type_error("a negated view");
  return t;
}

void* TorchTensors::stream(Device device) const {
  void* stream = nullptr;
  if (device.type != DeviceType::kCuda) return stream;
  if (exchange_->current_stream == nullptr) refuse("stream");
  if (exchange_->current_stream(kDLCUDA, device.index, &stream) != 0) throw nb::python_error();
  return stream;
}

TorchRuns::TorchRuns(nb::tuple types, nb::object differentiates, const Plan& plan, bool with_lse)
    : tensors_(std::move(types)),
      differentiates_(std::move(differentiates)),
      current_level_(interned("_current_level")),
      plan_(plan),
      with_lse_(with_lse) {}

Tensor TorchRuns::view(const char* name, nb::handle tensor) const {
  const Tensor view = tensors_.view(name, tensor);
  if (tensors_.requires_grad(tensor)) refuse(name);
  return view;
}

bool TorchRuns::read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args) const {
  bool known = false;
  const auto visit = [&](const TensorRule& rule, auto& t) {
    if (rule.written() || rule.need != Need::kOptional || name != rule.name) return;
    t = view(rule.name, tensor);
    known = true;
  };
  for_each_tensor(visit, args);
  return known;
}

nb::object TorchRuns::run(nb::handle q, nb::handle k, nb::handle v, const nb::dict& given) const {
  if (!tensors_.is_one(q)) return nb::none();  // what throws takes longer
  return or_none([&]() -> nb::object {
    if (nb::cast<int64_t>(differentiates_.attr(current_level_)) >= 0) return nb::none();
    ForwardArgs args;
    Run options;
    args.q = view("q", q);
    args.k = view("k", k);
    args.v = view("v", v);
    nb::object out, lse;
    for (const auto& [key, value] : given) {
      if (value.is_none()) continue;
      const std::string_view name = text_of(key);
      if (name == "out") {
        out = nb::borrow(value);
      } else if (name == "lse") {
        lse = nb::borrow(value);
      } else if (name == "seed") {
        read("seed", value, options.dropout_seed);
      } else if (name == "offset") {
        read("offset", value, options.dropout_offset);
      } else if (!read_tensor(name, value, args)) {
        return nb::none();
      }
    }
    if (lse.is_valid() && !with_lse_) return nb::none();
    if (out.is_valid()) args.out = view("out", out);
    if (lse.is_valid()) args.lse = view("lse", lse);
    options.stream = tensors_.stream(args.q.device);
    TorchTensor fresh_out, fresh_lse;
    {
      const WithoutGil unlocked;
      if (!out.is_valid()) fresh_out = torch_out(args, "v", args.v);
      if (with_lse_ && !lse.is_valid()) fresh_lse = torch_lse(args);
      plan_.run(args, options);
    }
    if (fresh_out) out = torch_object(fresh_out);
    if (fresh_lse) lse = torch_object(fresh_lse);
    return with_lse_ ? nb::make_tuple(out, lse) : out;
  });
}

TorchDirect::TorchDirect(nb::tuple seen_by, nb::tuple types, nb::object record,
                         nb::object deterministic)
    : seen_by_(std::move(seen_by)),
      tensors_(std::move(types)),
      record_(std::move(record)),
      deterministic_(std::move(deterministic)) {}

bool TorchDirect::has_to_be_seen() const {
  for (const nb::handle sees : seen_by_) {
    if (is_true(sees())) return true;
  }
  return false;
}

bool TorchDirect::is_recorded(nb::handle object) const {
  return torch_grad_enabled() && tensors_.is_one(object) && tensors_.requires_grad(object);
}

bool TorchDirect::read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args,
                              Others& others) const {
  bool known = false;
  const auto visit = [&](const TensorRule& rule, auto& t) {
    if (rule.written() || rule.need != Need::kOptional || name != rule.name) return;
    t = tensors_.view(rule.name, tensor);
    known = true;
    others.names.append(rule.name);
    others.tensors.append(tensor);
    others.have_gradients = others.have_gradients && with_gradient(rule);
    if (!is_recorded(tensor)) return;
    // Gradients lie where q does. Those of others are refused in words.
    if (t.device != args.q.device || (rule.arg != Arg::kSinks && rule.arg != Arg::kBias)) {
      refuse(rule.name);
    }
    others.recorded = true;
  };
  for_each_tensor(visit, args);
  return known;
}

nb::object TorchDirect::attention(nb::handle q, nb::handle k, nb::handle v,
                                  const nb::dict& given) const {
  Others others;
  nb::object recorded;
  nb::object results = or_none([&]() -> nb::object {
    if (has_to_be_seen()) return nb::none();
    ForwardArgs args;
    Options options;
    nb::dict numbers;  // those given, by the names that operators have
    bool causal = false, with_lse = false;
    args.q = tensors_.view("q", q);
    args.k = tensors_.view("k", k);
    args.v = tensors_.view("v", v);
    for (const auto& [key, value] : given) {
      if (value.is_none()) continue;
      const std::string_view name = text_of(key);
      if (name == "causal") {
        read("causal", value, causal);
      } else if (name == "return_lse") {
        read("return_lse", value, with_lse);
      } else if (name == "window") {
        read_window(value, options.mask);
        numbers["window_left"] = options.mask.left;
        numbers["window_right"] = options.mask.right;
      } else if (name == "window_left" || name == "window_right" || name == "rng_state") {
        return nb::none();  // arguments of the operators alone
      } else if (read_option(name, value, options)) {
        numbers[key] = value;
      } else if (!read_tensor(name, value, args, others)) {
        return nb::none();
      }
    }
    if (causal) {
      options.mask.right = 0;
      numbers["window_right"] = 0;
    }
    if (options.dropout_p != 0) return nb::none();
    if (!is_recorded(q) && !is_recorded(k) && !is_recorded(v) && !others.recorded) {
      return compute(args, options, with_lse);
    }
    const bool floats =
        args.q.dtype <= DType::kF64 && args.k.dtype == args.q.dtype && args.v.dtype == args.q.dtype;
    if (!others.have_gradients || !floats) return nb::none();
    if (is_true(deterministic_())) numbers["deterministic"] = true;
    nb::object computed = compute(args, options, true);
    recorded = nb::make_tuple(numbers, nb::tuple(others.names), computed, with_lse);
    return computed;
  });
  if (!recorded.is_valid()) return results;
  // What hooks of saved tensors throw is the caller's: checkpointing ends a call so.
  return record_(q, k, v, recorded, *others.tensors);
}

nb::object TorchDirect::compute(ForwardArgs& args, Options& options, bool with_lse) const {
  TorchTensor out, lse;
  {
    const WithoutGil unlocked;
    out = torch_out(args, "v", args.v);
    if (with_lse) lse = torch_lse(args);
    torch_forward(args, options);
  }
  return with_lse ? nb::make_tuple(torch_object(out), torch_object(lse)) : torch_object(out);
}

}  // namespace fulgur::python
