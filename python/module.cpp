/// The Python module fulgur._fulgur: views of arrays, plans, merge, engines. What users call, with
/// its defaults and its documentation, is fulgur/__init__.py.

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <regex>

#include "fulgur/fulgur.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using fulgur::BackwardArgs;
using fulgur::DType;
using fulgur::Error;
using fulgur::ForwardArgs;
using fulgur::Status;
using fulgur::Tensor;

/// A tensor and what keeps its memory alive; no memory for one that is only planned.
struct View {
  Tensor tensor;
  nb::ndarray<nb::ro> memory;
};

/// A plan and the Python options it was made of: they own the tensors that every run takes.
struct PlanOf {
  fulgur::Plan plan;
  nb::dict options;
};

[[noreturn]] void fail(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

/// Why `array` has no DLPack tensor, in the words of its own __dlpack__.
std::string refusal(nb::handle array) {
  if (!nb::hasattr(array, "__dlpack__")) return "";
  try {
    array.attr("__dlpack__")();
  } catch (const nb::python_error& error) {
    return fmt::format(" ({})", nb::str(error.value()).c_str());
  }
  return "";
}

/// A view of the memory of `array`, never a copy. A bfloat16 array of a producer that cannot say so
/// (NumPy) comes as its 16-bit integers, with `bf16`.
View view(const char* name, nb::handle array, bool writable, bool bf16) {
  View result;
  if (!nb::try_cast(array, result.memory, false)) {
    throw nb::type_error(
        fmt::format("{}: got {}{}, want a NumPy array or an object with __dlpack__", name,
                    nb::type_name(array.type()).c_str(), refusal(array))
            .c_str());
  }
  if (writable) {
    nb::ndarray<> memory;
    if (!nb::try_cast(array, memory, false)) {
      fail(fmt::format("{}: got a read-only array, want a writable one", name));
    }
    result.memory = nb::ndarray<nb::ro>(memory);
  }
  const auto& memory = result.memory;
  const nb::dlpack::dtype dtype = memory.dtype();
  DLTensor tensor{};
  tensor.data = const_cast<void*>(memory.data_handle());
  tensor.device = {static_cast<DLDeviceType>(memory.device_type()), memory.device_id()};
  tensor.ndim = static_cast<int>(memory.ndim());
  tensor.dtype = {bf16 ? uint8_t{kDLBfloat} : dtype.code, dtype.bits, dtype.lanes};
  tensor.shape = const_cast<int64_t*>(memory.shape_ptr());
  tensor.strides = const_cast<int64_t*>(memory.stride_ptr());
  tensor.byte_offset = memory.byte_offset();
  result.tensor = Tensor::from_dlpack(tensor, name);
  return result;
}

/// A contiguous tensor without memory, on the device of `like` (None: the CPU), to plan with.
View planned(const char* name, const std::vector<int64_t>& shape, const std::string& dtype,
             const View* like) {
  const size_t most = Tensor::kMaxRank;
  if (shape.empty() || shape.size() > most) {
    fail(fmt::format("{}: got {} dimensions, want 1 to {}", name, shape.size(), most));
  }
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32}) {
    if (dtype == fulgur::name_of(type)) {
      const auto device = like ? like->tensor.device : fulgur::Device{};
      return {Tensor::contiguous(nullptr, type, shape, device), {}};
    }
  }
  fail(fmt::format("dtype: got '{}', want 'f32', 'bf16', 'f16' or 'f64'", dtype));
}

/// The planned tensor in the memory of a fresh contiguous array, whose producer may have written
/// the strides of empty tensors and of dimensions of size 1 in its own way.
View placed(const View& planned, const View& fresh) {
  View result{planned.tensor, fresh.memory};
  result.tensor.data = fresh.tensor.data;
  return result;
}

Tensor tensor_of(const View* view) { return view ? view->tensor : Tensor{}; }

ForwardArgs forward_args(const View& q, const View& k, const View& v, const View& out,
                         const View* lse) {
  return {q.tensor, k.tensor, v.tensor, out.tensor, tensor_of(lse)};
}

BackwardArgs backward_args(const View& dout, const View& q, const View& k, const View& v,
                           const View& out, const View& lse, const View& dq, const View& dk,
                           const View& dv) {
  return {dout.tensor, q.tensor,  k.tensor,  v.tensor, out.tensor,
          lse.tensor,  dq.tensor, dk.tensor, dv.tensor};
}

/// The options of __init__.py's _options, types and integer ranges checked there.
fulgur::Options read_options(const nb::dict& from) {
  fulgur::Options to;
  to.mask = {.left = nb::cast<int64_t>(from["left"]), .right = nb::cast<int64_t>(from["right"])};
  if (!from["scale"].is_none()) to.scale = nb::cast<double>(from["scale"]);
  to.softcap = nb::cast<double>(from["softcap"]);
  to.dropout_p = nb::cast<double>(from["dropout_p"]);
  to.max_seqlen_q = nb::cast<int64_t>(from["max_seqlen_q"]);
  to.max_seqlen_k = nb::cast<int64_t>(from["max_seqlen_k"]);
  to.deterministic = nb::cast<bool>(from["deterministic"]);
  to.invariant = nb::cast<bool>(from["invariant"]);
  to.threads = nb::cast<int>(from["threads"]);
  to.engine = nb::cast<std::string>(from["engine"]);
  return to;
}

/// The tensors and numbers among them that belong to a call.
template <class Args>
Args with_extras(Args args, const nb::dict& from) {
  const auto tensor = [&](const char* name) {
    return tensor_of(nb::cast<const View*>(from[name]));
  };
  args.alibi_slopes = tensor("alibi_slopes");
  args.cu_seqlens_q = tensor("cu_seqlens_q");
  args.cu_seqlens_k = tensor("cu_seqlens_k");
  args.seqused_k = tensor("seqused_k");
  return args;
}

template <class Args>
PlanOf make_plan(const Args& tensors, const nb::dict& options) {
  const Args args = with_extras(tensors, options);
  const fulgur::Options read = read_options(options);
  const auto plan_unlocked = [&] {
    nb::gil_scoped_release unlocked;
    return fulgur::plan(args, read);
  };
  return {plan_unlocked(), options};
}

template <class Args>
void run(const PlanOf& of, const Args& tensors) {
  const Args args = with_extras(tensors, of.options);
  const fulgur::Run run{.dropout_seed = nb::cast<uint64_t>(of.options["seed"]),
                        .dropout_offset = nb::cast<uint64_t>(of.options["offset"])};
  nb::gil_scoped_release unlocked;
  of.plan.run(args, run);
}

void merge(const std::vector<const View*>& outs, const std::vector<const View*>& lses,
           const View& out, const View& lse) {
  std::vector<fulgur::Partial> parts;
  for (size_t i = 0; i < outs.size(); ++i) parts.push_back({outs[i]->tensor, lses[i]->tensor});
  nb::gil_scoped_release unlocked;
  fulgur::merge(parts, {out.tensor, lse.tensor});
}

std::vector<std::tuple<std::string, std::string, std::string>> engines() {
  std::vector<std::tuple<std::string, std::string, std::string>> result;
  for (const auto& [name, description, unavailable] : fulgur::engines()) {
    result.emplace_back(name, description, unavailable);
  }
  return result;
}

/// The message with the names of the Python arguments.
std::string in_python(std::string message) {
  static const std::pair<std::regex, const char*> kNames[] = {
      {std::regex(R"(\bparts\[(\d+)\]\.(out|lse)\b)"), "$2s[$1]"}};
  for (const auto& [name, python] : kNames) message = std::regex_replace(message, name, python);
  return message;
}

/// kInvalidArgument is a ValueError, every other failure a fulgur.Error.
void translate(const std::exception_ptr& thrown, void* error_type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const bool invalid = error.status() == Status::kInvalidArgument;
    PyErr_SetString(invalid ? PyExc_ValueError : static_cast<PyObject*>(error_type),
                    in_python(error.what()).c_str());
  }
}

}  // namespace

NB_MODULE(_fulgur, m) {
  m.attr("__version__") = FULGUR_VERSION;
  const nb::object error =
      nb::steal(PyErr_NewExceptionWithDoc("fulgur.Error",
                                          "An engine failed: it lacks the feature, is not usable "
                                          "on this machine, or ran out of memory.",
                                          PyExc_RuntimeError, nullptr));
  m.attr("Error") = error;
  nb::register_exception_translator(translate, error.ptr());

  nb::class_<View>(m, "View")
      .def_prop_ro("shape",
                   [](const View& v) {
                     nb::list shape;
                     for (int i = 0; i < v.tensor.rank; ++i) shape.append(v.tensor.shape[i]);
                     return nb::tuple(shape);
                   })
      .def_prop_ro("dtype", [](const View& v) { return fulgur::name_of(v.tensor.dtype); })
      .def_prop_ro("data",
                   [](const View& v) { return reinterpret_cast<uintptr_t>(v.tensor.data); });
  m.def("view", &view, "name"_a, "array"_a.none(), "writable"_a = false, "bf16"_a = false);
  m.def("placed", &placed, "planned"_a, "fresh"_a);
  m.def("planned", &planned, "name"_a, "shape"_a, "dtype"_a, "like"_a.none() = nb::none());

  nb::class_<PlanOf>(m, "Plan")
      .def("explain", [](const PlanOf& of) { return of.plan.explain(); })
      .def(
          "run",
          [](const PlanOf& of, const View& q, const View& k, const View& v, const View& out,
             const View* lse) { run(of, forward_args(q, k, v, out, lse)); },
          "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none())
      .def(
          "run",
          [](const PlanOf& of, const View& dout, const View& q, const View& k, const View& v,
             const View& out, const View& lse, const View& dq, const View& dk,
             const View& dv) { run(of, backward_args(dout, q, k, v, out, lse, dq, dk, dv)); },
          "dout"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dq"_a, "dk"_a, "dv"_a);
  m.def(
      "plan",
      [](const nb::dict& options, const View& q, const View& k, const View& v, const View& out,
         const View* lse) { return make_plan(forward_args(q, k, v, out, lse), options); },
      "options"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none());
  m.def(
      "plan",
      [](const nb::dict& options, const View& dout, const View& q, const View& k, const View& v,
         const View& out, const View& lse, const View& dq, const View& dk, const View& dv) {
        return make_plan(backward_args(dout, q, k, v, out, lse, dq, dk, dv), options);
      },
      "options"_a, "dout"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dq"_a, "dk"_a, "dv"_a);
  m.def("merge", &merge, "outs"_a, "lses"_a, "out"_a, "lse"_a);
  m.def("engines", &engines);
  m.def("stop_threads", [] { omp_pause_resource_all(omp_pause_hard); });
}
