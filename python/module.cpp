/// The Python module fulgur._fulgur: plans, append, merge, engines, on views of arrays. What users
/// call is fulgur/_calls.py and fulgur/_plans.py, its defaults and documentation fulgur/_spec.py.

#include <fmt/format.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <regex>
#include <string_view>
#include <utility>
#include <vector>

#include "api/prepare.h"
#include "arrays.h"
#include "call/tensors.h"
#include "calls.h"
#include "expressions.h"
#include "fulgur/append.h"
#include "fulgur/codes/hadamard.h"
#include "fulgur/cuda.h"
#include "fulgur/distributed/plan.h"
#include "fulgur/scores.h"
#include "groups.h"
#include "jax_ffi.h"
#include "program.h"
#include "torch_direct.h"
#include "torch_ops.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using fulgur::AppendArgs;
using fulgur::BackwardArgs;
using fulgur::Error;
using fulgur::ForwardArgs;
using fulgur::Status;
using fulgur::Tensor;
using fulgur::python::fail;
using fulgur::python::View;
using fulgur::python::WorkspaceView;

/// The entries of a dict of a Python call, by name. Lookups in the dict itself would make a Python
/// string of each name, and a call has dozens of names.
class Entries {
 public:
  Entries(const nb::dict& entries) {  // NOLINT(google-explicit-constructor)
    entries_.reserve(entries.size());
    for (const auto& [name, value] : entries) {
      entries_.emplace_back(nb::borrow<nb::str>(name).c_str(), value);
    }
  }
  /// Null where there is none.
  nb::handle operator[](std::string_view name) const {
    for (const auto& [known, value] : entries_) {
      if (known == name) return value;
    }
    return {};
  }

 private:
  std::vector<std::pair<std::string_view, nb::handle>> entries_;
};

/// The tensor of that name in a Python call; none, or None, is "not given".
Tensor tensor(const Entries& views, std::string_view name) {
  const nb::handle view = views[name];
  return view.is_valid() && !view.is_none() ? nb::cast<const View&>(view).tensor : Tensor{};
}

/// The tensors of a call by the names that they have in C++.
template <class Args>
Args read_args(const Entries& views) {
  Args args;
  const auto read = [&](const fulgur::TensorRule& rule, auto& t) { t = tensor(views, rule.name); };
  fulgur::for_each_tensor(read, args);
  if constexpr (requires { args.tensors; }) {
    args.tensors = fulgur::python::bindings_of(views["tensors"], views["dtensors"]);
  }
  return args;
}

/// The options of _arguments.py, types and integer ranges checked there.
fulgur::Options read_options(const Entries& from) {
  fulgur::Options to;
  const auto read = [&]<class T>(const char* name, T& option) { option = nb::cast<T>(from[name]); };
  fulgur::python::for_each_option(read, to);
  to.score_mod = fulgur::python::expression_of(from["score_mod"]);
  to.mask_mod = fulgur::python::expression_of(from["mask_mod"]);
  to.threads = nb::cast<int>(from["threads"]);
  to.engine = nb::cast<std::string>(from["engine"]);
  to.algorithm = nb::cast<std::string>(from["algorithm"]);
  return to;
}

fulgur::Run read_run(uintptr_t stream, uint64_t seed, uint64_t offset) {
  return {
      .stream = reinterpret_cast<void*>(stream), .dropout_seed = seed, .dropout_offset = offset};
}

// Each of these reads Python's objects, then computes without the GIL. The caller's `views` keep
// the memory alive.

template <class Args>
void compute(const nb::dict& views, const nb::dict& options, uintptr_t stream, uint64_t seed,
             uint64_t offset) {
  const Args args = read_args<Args>(views);
  const fulgur::Options read = read_options(options);
  const fulgur::Run run = read_run(stream, seed, offset);
  const fulgur::python::WithoutGil unlocked;
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    fulgur::forward(args, read, run);
  } else {
    fulgur::backward(args, read, run);
  }
}

template <class Args>
void compute_by_group(const fulgur::Group& group, const std::string& sharding, int head_ranks,
                      bool ring, const nb::dict& views, const nb::dict& options, uintptr_t stream,
                      uint64_t seed, uint64_t offset) {
  const Args args = read_args<Args>(views);
  const fulgur::Options read = read_options(options);
  const fulgur::Run run = read_run(stream, seed, offset);
  const auto distribution = fulgur::python::distribution_of(sharding, head_ranks, ring);
  const fulgur::python::WithoutGil unlocked;
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    fulgur::forward(args, read, group, distribution, run);
  } else {
    fulgur::backward(args, read, group, distribution, run);
  }
}

template <class Args>
fulgur::Plan make_plan(const nb::dict& views, const nb::dict& options, const std::string& card) {
  const Args args = read_args<Args>(views);
  const fulgur::Options read = read_options(options);
  const fulgur::python::WithoutGil unlocked;
  return card.empty() ? fulgur::plan(args, read) : fulgur::cuda::plan_for_card(card, args, read);
}

template <class Args>
void run_plan(const fulgur::Plan& plan, const nb::dict& views, uintptr_t stream, uint64_t seed,
              uint64_t offset, nb::handle workspace) {
  const Args args = read_args<Args>(views);
  fulgur::Run run = read_run(stream, seed, offset);
  WorkspaceView given;
  if (!workspace.is_none()) {
    given = fulgur::python::workspace_view(workspace, args.q.device, stream);
    run.workspace = given.workspace;
    // An empty array may have no address, and that would mean "not given".
    const int64_t want = plan.workspace().bytes;
    if (run.workspace.bytes < want) {
      fail(fmt::format("workspace: got {} bytes, want {}", run.workspace.bytes, want));
    }
  }
  const fulgur::python::WithoutGil unlocked;
  plan.run(args, run);
}

void merge(const std::vector<const View*>& outs, const std::vector<const View*>& lses,
           const View& out, const View& lse, uintptr_t stream) {
  std::vector<fulgur::Partial> parts;
  for (size_t i = 0; i < outs.size(); ++i) parts.push_back({outs[i]->tensor, lses[i]->tensor});
  const fulgur::python::WithoutGil unlocked;
  fulgur::merge(parts, {out.tensor, lse.tensor}, {.stream = reinterpret_cast<void*>(stream)});
}

/// `stage`: the number of a fulgur::ScoreStage.
void scores(const nb::dict& views, const nb::dict& options, int stage, uintptr_t stream) {
  auto args = read_args<fulgur::ScoresArgs>(views);
  args.stage = static_cast<fulgur::ScoreStage>(stage);
  const fulgur::Options read = read_options(options);
  const fulgur::python::WithoutGil unlocked;
  fulgur::scores(args, read, {.stream = reinterpret_cast<void*>(stream)});
}

std::array<int64_t, 4> scores_shape(const nb::dict& views, const nb::dict& options) {
  return fulgur::scores_shape(read_args<fulgur::ScoresArgs>(views), read_options(options));
}

AppendArgs read_append(const Entries& views, bool interleaved) {
  AppendArgs args = read_args<AppendArgs>(views);
  args.rows.rotary.interleaved = interleaved;
  return args;
}

/// Checks the shapes and options of a call whose arrays are not there yet.
void check_append(const nb::dict& views, const nb::dict& options, bool interleaved) {
  fulgur::prepare(read_append(views, interleaved), read_options(options));
}

void append(const nb::dict& views, const nb::dict& options, bool interleaved, uintptr_t stream) {
  const AppendArgs args = read_append(views, interleaved);
  const fulgur::Options read = read_options(options);
  const fulgur::python::WithoutGil unlocked;
  fulgur::append(args, read, {.stream = reinterpret_cast<void*>(stream)});
}

/// A call that appends and attends.
struct AppendForward {
  ForwardArgs args;
  fulgur::Options options;

  AppendForward(const Entries& views, const Entries& options, bool interleaved)
      : args(read_args<ForwardArgs>(views)), options(read_options(options)) {
    args.append = read_args<fulgur::NewRows>(views);
    args.append.rotary.interleaved = interleaved;
  }
};

/// Checks the shapes and options of a call whose arrays are not there yet.
void check_append_forward(const nb::dict& views, const nb::dict& options, bool interleaved) {
  const AppendForward call(views, options, interleaved);
  fulgur::plan(call.args, call.options);
}

void append_forward(const nb::dict& views, const nb::dict& options, bool interleaved,
                    uintptr_t stream) {
  const AppendForward call(views, options, interleaved);
  const fulgur::python::WithoutGil unlocked;
  fulgur::forward(call.args, call.options, {.stream = reinterpret_cast<void*>(stream)});
}

void quantize(const nb::dict& given, bool static_scale, bool static_mean, int threads,
              uintptr_t stream) {
  const Entries views(given);
  const fulgur::QuantizeArgs args{tensor(views, "x"),
                                  tensor(views, "codes"),
                                  tensor(views, "scale"),
                                  tensor(views, "zero_point"),
                                  static_scale,
                                  tensor(views, "mean"),
                                  static_mean};
  fulgur::Options options;
  options.threads = threads;
  const fulgur::python::WithoutGil unlocked;
  fulgur::quantize(args, options, {.stream = reinterpret_cast<void*>(stream)});
}

void dequantize(const nb::dict& given, int threads, uintptr_t stream) {
  const Entries views(given);
  const fulgur::DequantizeArgs args{tensor(views, "codes"), tensor(views, "scale"),
                                    tensor(views, "zero_point"), tensor(views, "x"),
                                    tensor(views, "mean")};
  fulgur::Options options;
  options.threads = threads;
  const fulgur::python::WithoutGil unlocked;
  fulgur::dequantize(args, options, {.stream = reinterpret_cast<void*>(stream)});
}

void hadamard(const nb::dict& given, bool inverse, int threads, uintptr_t stream) {
  const Entries views(given);
  const fulgur::HadamardArgs args{tensor(views, "x"), tensor(views, "y"), inverse};
  fulgur::Options options;
  options.threads = threads;
  const fulgur::python::WithoutGil unlocked;
  fulgur::hadamard(args, options, {.stream = reinterpret_cast<void*>(stream)});
}

void expand_blocks(const nb::dict& given) {
  const Entries views(given);
  fulgur::expand_blocks({tensor(views, "offsets"), tensor(views, "indices")},
                        tensor(views, "blocks"));
}

/// (numbers of a block, its bytes, the dtype of arrays of codes, whether blocks have scales).
std::tuple<int64_t, int64_t, std::string, bool> format(const std::string& name) {
  const fulgur::DType dtype = fulgur::format_named(name.c_str());
  const int64_t block = fulgur::block_of(dtype);
  return {block, fulgur::size_of(dtype), block == 1 ? name : "u8", fulgur::has_scales(dtype)};
}

std::vector<std::tuple<std::string, std::string, std::string>> engines() {
  std::vector<std::tuple<std::string, std::string, std::string>> result;
  for (const auto& [name, description, unavailable] : fulgur::engines()) {
    result.emplace_back(name, description, unavailable);
  }
  return result;
}

/// {call: {platform: {stage: handler}}}, as jax.ffi.register_ffi_target takes the innermost.
nb::dict jax_handlers() {
  const auto inner = [](nb::dict& outer, const char* key) {
    if (!outer.contains(key)) outer[key] = nb::dict();
    return nb::cast<nb::dict>(outer[key]);
  };
  nb::dict calls;
  for (const auto& [target, platform, stage, handler] : fulgur::python::jax_handlers()) {
    nb::dict platforms = inner(calls, target);
    inner(platforms, platform)[stage] = nb::capsule(reinterpret_cast<void*>(handler));
  }
  return calls;
}

/// {call: (names of operands, names of results)}.
nb::dict jax_calls() {
  nb::dict calls;
  for (const auto& [target, operands, results] : fulgur::python::jax_calls()) {
    calls[target] = nb::make_tuple(operands, results);
  }
  return calls;
}

/// A tensor of the library's calls.
struct TensorEntry {
  const char* name;
  int number;  ///< of its Arg
  bool required, written;
  const char *dtype, *shape;  ///< in words; empty where they follow from q, k and v
};

const char* words(fulgur::TensorShape shape) {
  switch (shape) {
    case fulgur::TensorShape::kHeads:
      return "``(hq,)``";
    case fulgur::TensorShape::kSlopes:
      return "``(hq,)`` or ``(batch, hq)``";
    case fulgur::TensorShape::kBatch:
      return "``(batch,)``";
    case fulgur::TensorShape::kBatchPlusOne:
      return "``(batch + 1,)``";
    case fulgur::TensorShape::kGroups:
      return "``(groups,)``";
    case fulgur::TensorShape::kGroupsPlusOne:
      return "``(groups + 1,)``";
    case fulgur::TensorShape::kSeedAndOffset:
      return "``(2,)``";
    case fulgur::TensorShape::kQueries:
      return "``(batch, sq)`` or packed ``(total_q,)``";
    default:
      return "";
  }
}

const char* words(fulgur::TensorType type) {
  switch (type) {
    case fulgur::TensorType::kF32:
      return "float32";
    case fulgur::TensorType::kSinkType:
      return "float32 or the 16-bit dtype of q";
    case fulgur::TensorType::kI32:
      return "int32";
    case fulgur::TensorType::kI64:
      return "int64";
    case fulgur::TensorType::kDescale:
      return "float32 or float16";
    default:
      return "";
  }
}

template <class Args>
std::vector<TensorEntry> tensor_entries() {
  std::vector<TensorEntry> entries;
  Args args;
  const auto visit = [&](const fulgur::TensorRule& rule, auto&) {
    entries.push_back({.name = rule.name,
                       .number = static_cast<int>(rule.arg),
                       .required = rule.need != fulgur::Need::kOptional,
                       .written = rule.written(),
                       .dtype = words(rule.type),
                       .shape = words(rule.shape)});
  };
  fulgur::for_each_tensor(visit, args);
  return entries;
}

/// {call: its tensors}, in the order of the library's tables.
nb::dict tensors() {
  nb::dict calls;
  calls["forward"] = tensor_entries<ForwardArgs>();
  calls["backward"] = tensor_entries<BackwardArgs>();
  calls["append"] = tensor_entries<AppendArgs>();
  calls["scores"] = tensor_entries<fulgur::ScoresArgs>();
  return calls;
}

/// {name: default} of the options that JAX's calls take, in their order.
nb::dict option_defaults() {
  nb::dict defaults;
  const auto visit = [&](const char* name, const auto& value) { defaults[name] = value; };
  fulgur::Options options;
  fulgur::python::for_each_option(visit, options);
  return defaults;
}

/// The program, with its name as the first argument.
int run_program(std::vector<std::string> arguments) {
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const fulgur::python::WithoutGil unlocked;
  return fulgur::app::run_program(static_cast<int>(arguments.size()), pointers.data());
}

/// The message with the names of the Python arguments.
std::string in_python(std::string message) {
  static const std::pair<std::regex, const char*> kNames[] = {
      {std::regex(R"(\bparts\[(\d+)\]\.(out|lse)\b)"), "$2s[$1]"},
      {std::regex("^parts:"), "outs:"}};
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
      .def_prop_ro("device", [](const View& v) { return fulgur::name_of(v.tensor.device); })
      .def("as_format",
           [](const View& v, const std::string& format, const char* name) {
             View result = v;
             result.tensor = v.tensor.as(fulgur::format_named(format.c_str()), name);
             return result;
           })
      .def_prop_ro("data",
                   [](const View& v) { return reinterpret_cast<uintptr_t>(v.tensor.data); });
  m.def("view", &fulgur::python::view, "name"_a, "array"_a.none(), "writable"_a = false,
        "stream"_a = 0);
  m.def("host_view", &fulgur::python::host_view);
  m.def("planned", &fulgur::python::planned, "name"_a, "shape"_a, "dtype"_a, "device"_a = "cpu");
  m.def("current_stream", &fulgur::python::current_stream, "array"_a.none());

  fulgur::python::register_expressions(m);

  nb::class_<fulgur::Plan>(m, "Plan")
      .def("explain", [](const fulgur::Plan& plan) { return plan.explain(); })
      .def("explain_tiles",
           [](const fulgur::Plan& plan, const nb::dict& tensors) {
             return plan.explain(fulgur::python::bindings_of(tensors, {}));
           })
      .def("details", [](const fulgur::Plan& plan) { return plan.details().json(); })
      .def("workspace",
           [](const fulgur::Plan& plan) {
             const auto [bytes, alignment, zeroed_bytes] = plan.workspace();
             return nb::make_tuple(bytes, alignment, zeroed_bytes);
           })
      .def("run_forward", &run_plan<ForwardArgs>, "views"_a, "stream"_a, "seed"_a, "offset"_a,
           "workspace"_a.none())
      .def("run_backward", &run_plan<BackwardArgs>, "views"_a, "stream"_a, "seed"_a, "offset"_a,
           "workspace"_a.none());
  m.def("plan_forward", &make_plan<ForwardArgs>, "views"_a, "options"_a, "card"_a = "");
  m.def("plan_backward", &make_plan<BackwardArgs>, "views"_a, "options"_a, "card"_a = "");
  m.def("forward", &compute<ForwardArgs>, "views"_a, "options"_a, "stream"_a, "seed"_a, "offset"_a);
  m.def("backward", &compute<BackwardArgs>, "views"_a, "options"_a, "stream"_a, "seed"_a,
        "offset"_a);
  fulgur::python::register_groups(m);
  m.def("forward_by_group", &compute_by_group<ForwardArgs>, "group"_a, "sharding"_a, "head_ranks"_a,
        "ring"_a, "views"_a, "options"_a, "stream"_a, "seed"_a, "offset"_a);
  m.def("backward_by_group", &compute_by_group<BackwardArgs>, "group"_a, "sharding"_a,
        "head_ranks"_a, "ring"_a, "views"_a, "options"_a, "stream"_a, "seed"_a, "offset"_a);
  m.def("merge", &merge, "outs"_a, "lses"_a, "out"_a, "lse"_a, "stream"_a);
  m.def("scores", &scores, "views"_a, "options"_a, "stage"_a, "stream"_a);
  m.def("scores_shape", &scores_shape, "views"_a, "options"_a);
  m.def("check_append", &check_append, "views"_a, "options"_a, "interleaved"_a);
  m.def("check_append_forward", &check_append_forward, "views"_a, "options"_a, "interleaved"_a);
  m.def("append", &append, "views"_a, "options"_a, "interleaved"_a, "stream"_a);
  m.def("append_forward", &append_forward, "views"_a, "options"_a, "interleaved"_a, "stream"_a);
  m.def("hadamard", &hadamard, "views"_a, "inverse"_a, "threads"_a, "stream"_a);
  m.def("quantize", &quantize, "views"_a, "static_scale"_a, "static_mean"_a, "threads"_a,
        "stream"_a);
  m.def("dequantize", &dequantize, "views"_a, "threads"_a, "stream"_a);
  m.def("expand_blocks", &expand_blocks, "views"_a);
  m.def("format", &format, "name"_a);
  m.def("engines", &engines);
  m.def("register_torch_ops", [] {
    fulgur::python::register_torch_ops();
    // PyTorch keeps the functions of operators, and with them this module: at the end of the
    // process that is no leak.
    nb::set_leak_warnings(false);
  });
  nb::class_<fulgur::python::TorchRuns>(m, "TorchRuns")
      .def(nb::init<nb::tuple, nb::object, const fulgur::Plan&, bool>(), "types"_a,
           "differentiates"_a, "plan"_a, "with_lse"_a)
      .def("run", &fulgur::python::TorchRuns::run, "q"_a.none(), "k"_a.none(), "v"_a.none(),
           "given"_a);
  nb::class_<fulgur::python::TorchDirect>(m, "TorchDirect")
      .def(nb::init<nb::tuple, nb::tuple, nb::object, nb::object>(), "seen_by"_a, "types"_a,
           "record"_a, "deterministic"_a)
      .def("attention", &fulgur::python::TorchDirect::attention, "q"_a.none(), "k"_a.none(),
           "v"_a.none(), "given"_a);
  m.def("torch_schemas", &fulgur::python::torch_schemas);
  m.def("jax_handlers", &jax_handlers);
  m.def("jax_calls", &jax_calls);
  nb::class_<TensorEntry>(m, "TensorEntry")
      .def_ro("name", &TensorEntry::name)
      .def_ro("number", &TensorEntry::number)
      .def_ro("required", &TensorEntry::required)
      .def_ro("written", &TensorEntry::written)
      .def_ro("dtype", &TensorEntry::dtype)
      .def_ro("shape", &TensorEntry::shape);
  m.def("tensors", &tensors);
  m.def("option_defaults", &option_defaults);
  m.def("run_program", &run_program, "arguments"_a);
  // Daemon threads keep what they compute with: at the end of the process that is no leak.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    const auto threads = nb::module_::import_("threading").attr("active_count")();
    if (nb::cast<int>(threads) > 1) nb::set_leak_warnings(false);
  }));
  m.def("stop_threads", [] { omp_pause_resource_all(omp_pause_hard); });
}
