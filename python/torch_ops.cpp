#include "torch_ops.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "calls.h"
#include "fulgur/fulgur.h"

namespace fulgur::python {
namespace {

// torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h, as far as it is used.

using Handle = OpaqueTensor*;
struct OpaqueLibrary;
using Kernel = void(uint64_t* stack, uint64_t arguments, uint64_t results);

// Of PyTorch's C++ interface what the names of two functions say, where no function of the shim is
// as fast.

/// c10::IntArrayRef.
struct Integers {
  const int64_t* data;
  size_t size;
};
/// std::optional<c10::Device>.
struct OptionalDevice {
  int8_t type, index;
  bool given;
};
/// at::TensorBase, and with it at::Tensor, which a handle of the shim points to. It is returned as
/// a class with a destructor is.
struct TensorBase {
  void* tensor;
  ~TensorBase() {}  // NOLINT(modernize-use-equals-default)
};

/// One of torch's libraries that is in the process already.
class LoadedLibrary {
 public:
  explicit LoadedLibrary(const char* name)
      : name_(name), library_(dlopen(name, RTLD_NOW | RTLD_NOLOAD)) {}

  bool loaded() const { return library_ != nullptr; }

  template <class Function>
  Function* optional(const char* function) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library_, function));
  }
  template <class Function>
  Function* function(const char* function) const {
    if (auto* found = optional<Function>(function)) return found;
    throw Error(
        Status::kUnavailable,
        fmt::format("fulgur.torch: {} has no {}, want PyTorch 2.11 or newer", name_, function));
  }

 private:
  const char* name_;
  void* library_;
};

struct Torch {
  LoadedLibrary cpu_library{"libtorch_cpu.so"}, cuda_library{"libtorch_cuda.so"},
      python_library{"libtorch_python.so"};

#define FULGUR_TORCH(name, ...) \
  int32_t (*name)(__VA_ARGS__) = cpu_library.function<int32_t(__VA_ARGS__)>("aoti_torch_" #name)
  FULGUR_TORCH(library_init_impl, const char* space, const char* key, const char* file,
               uint32_t line, OpaqueLibrary** library);
  FULGUR_TORCH(library_impl, OpaqueLibrary*, const char* name, Kernel*);
  FULGUR_TORCH(delete_tensor_object, Handle);
  FULGUR_TORCH(get_data_ptr, Handle, void**);
  FULGUR_TORCH(get_dim, Handle, int64_t*);
  FULGUR_TORCH(get_sizes, Handle, int64_t**);
  FULGUR_TORCH(get_strides, Handle, int64_t**);
  FULGUR_TORCH(get_dtype, Handle, int32_t*);
  FULGUR_TORCH(get_device_type, Handle, int32_t*);
  FULGUR_TORCH(get_device_index, Handle, int32_t*);
  FULGUR_TORCH(empty_strided, int64_t rank, const int64_t* sizes, const int64_t* strides,
               int32_t dtype, int32_t device_type, int32_t device, Handle*);
#undef FULGUR_TORCH

  /// Null in a PyTorch without CUDA.
  int32_t (*current_cuda_stream)(int32_t device, void** stream) =
      cuda_library.optional<int32_t(int32_t, void**)>("aoti_torch_get_current_cuda_stream");
  bool (*grad_enabled)() = cpu_library.function<bool()>("aoti_torch_grad_mode_is_enabled");
  int32_t (*num_threads)(uint32_t*) =
      cpu_library.function<int32_t(uint32_t*)>("torch_get_num_threads");
  /// Null before PyTorch 2.13, which deletes with C++'s own operator.
  int32_t (*delete_value)(uint64_t*) =
      cpu_library.optional<int32_t(uint64_t*)>("torch_delete_stable_ivalue");
  // Null in a PyTorch that does it otherwise.

  /// THPVariable_Wrap(const at::TensorBase&).
  PyObject* (*wrap)(Handle) =
      python_library.optional<PyObject*(Handle)>("_Z16THPVariable_WrapRKN2at10TensorBaseE");
  /// at::detail::empty_strided_cuda(sizes, strides, c10::ScalarType, std::optional<c10::Device>),
  /// which the graphs of torch.compile call: the shim's function goes through the dispatcher.
  TensorBase (*empty_on_cuda)(Integers, Integers, int8_t, OptionalDevice) =
      cuda_library.optional<TensorBase(Integers, Integers, int8_t, OptionalDevice)>(
          "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_"
          "6DeviceEE");
  /// Null where failures of the shim leave no words.
  const char* (*what)() =
      cpu_library.optional<const char*()>("torch_exception_get_what_without_backtrace");

  int32_t cpu = constant("device_type_cpu"), cuda = constant("device_type_cuda");
  std::vector<std::pair<int32_t, DType>> dtypes{{constant("dtype_float32"), DType::kF32},
                                                {constant("dtype_bfloat16"), DType::kBF16},
                                                {constant("dtype_float16"), DType::kF16},
                                                {constant("dtype_float64"), DType::kF64},
                                                {constant("dtype_int32"), DType::kI32},
                                                {constant("dtype_int64"), DType::kI64},
                                                {constant("dtype_bool"), DType::kBool},
                                                {constant("dtype_float8_e4m3fn"), DType::kE4M3},
                                                {constant("dtype_float8_e5m2"), DType::kE5M2},
                                                {constant("dtype_int8"), DType::kInt8}};

  int32_t constant(const char* name) const {
    return cpu_library.function<int32_t()>((std::string("aoti_torch_") + name).c_str())();
  }
  void check(int32_t failed) const {
    if (failed == 0) return;
    const char* words = what == nullptr ? nullptr : what();
    fail(words == nullptr ? "no reason given" : words);
  }
  [[noreturn]] static void fail(std::string_view why) {
    throw Error(Status::kInternal, fmt::format("PyTorch failed: {}", why));
  }
};

/// Set by find_torch(), before any kernel can run, and never destroyed.
const Torch* torch = nullptr;

struct DeleteValue {
  void operator()(uint64_t* value) const {
    if (torch->delete_value != nullptr) {
      torch->delete_value(value);
    } else {
      delete value;
    }
  }
};

/// Reads a kernel's arguments in their order, and owns the tensors among them. All have to be read
/// before anything can fail.
class Arguments {
 public:
  explicit Arguments(const uint64_t* stack) : next_(stack) { owned_.reserve(32); }

  Handle tensor(const TensorRule&) {
    return owned_.emplace_back(reinterpret_cast<Handle>(*next_++)).get();
  }
  Handle optional_tensor(const TensorRule&) {
    const auto value = optional();
    if (value == nullptr) return nullptr;
    return owned_.emplace_back(reinterpret_cast<Handle>(*value)).get();
  }
  void operator()(const char*, int64_t& to) { to = static_cast<int64_t>(*next_++); }
  void operator()(const char*, double& to) { to = std::bit_cast<double>(*next_++); }
  void operator()(const char*, bool& to) { to = (*next_++ & 1) != 0; }
  void operator()(const char*, std::optional<double>& to) {
    const auto value = optional();
    if (value != nullptr) to = std::bit_cast<double>(*value);
  }

 private:
  std::unique_ptr<uint64_t, DeleteValue> optional() {
    return std::unique_ptr<uint64_t, DeleteValue>(reinterpret_cast<uint64_t*>(*next_++));
  }

  const uint64_t* next_;
  std::vector<TorchTensor> owned_;
};

/// Writes the arguments of a schema where Arguments would read them. All options have a default:
/// an argument that a call leaves out costs half of one that it passes, 0.1 to 0.2 us.
class Schema {
 public:
  Handle tensor(const TensorRule& rule) {
    add(fmt::format("Tensor{} {}", written(rule), rule.name));
    return nullptr;
  }
  Handle optional_tensor(const TensorRule& rule) {
    add(fmt::format("Tensor{}? {}=None", written(rule), rule.name));
    return nullptr;
  }
  void operator()(const char* name, int64_t value) {
    add(fmt::format("SymInt {}={}", name, value));
  }
  void operator()(const char* name, double value) {
    add(fmt::format("float {}={:.1f}", name, value));
  }
  void operator()(const char* name, bool value) {
    add(fmt::format("bool {}={}", name, value ? "True" : "False"));
  }
  void operator()(const char* name, const std::optional<double>&) {
    add(fmt::format("float? {}=None", name));
  }

  const std::string& text() const { return text_; }

 private:
  /// The alias annotation of a tensor that the operator writes.
  std::string written(const TensorRule& rule) {
    return rule.written() ? fmt::format("({}!)", alias_++) : "";
  }
  void add(const std::string& argument) {
    text_ += text_.empty() ? "" : ", ";
    text_ += argument;
  }

  std::string text_;
  char alias_ = 'a';
};

DType dtype_of(const char* name, Handle handle) {
  int32_t dtype = 0;
  torch->check(torch->get_dtype(handle, &dtype));
  for (const auto& [code, type] : torch->dtypes) {
    if (code == dtype) return type;
  }
  throw Error(
      Status::kInvalidArgument,
      fmt::format("{}: got another dtype, want float32, bfloat16, float16, float64, a float8 or "
                  "int8, or int32 for lengths",
                  name));
}

Device device_of(const char* name, Handle handle) {
  int32_t type = 0, index = 0;
  torch->check(torch->get_device_type(handle, &type));
  if (type == torch->cpu) return {};
  if (type != torch->cuda) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{}: got a tensor on another device, want cpu or cuda", name));
  }
  torch->check(torch->get_device_index(handle, &index));
  return {DeviceType::kCuda, index};
}

/// The view of a tensor; of none where there is none.
Tensor view(const char* name, Handle handle) {
  Tensor t;
  if (handle == nullptr) return t;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  torch->check(torch->get_dim(handle, &rank));
  if (rank < 1 || rank > Tensor::kMaxRank) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: got {} dimensions, want 1 to {}", name,
                                                      rank, int{Tensor::kMaxRank}));
  }
  torch->check(torch->get_sizes(handle, &sizes));
  if (torch->get_strides(handle, &strides) != 0) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: got None, want a tensor", name));
  }
  torch->check(torch->get_data_ptr(handle, &t.data));
  t.rank = static_cast<int>(rank);
  std::copy_n(sizes, rank, t.shape.begin());
  std::copy_n(strides, rank, t.strides.begin());
  t.dtype = dtype_of(name, handle);
  t.device = device_of(name, handle);
  return t;
}

/// Fresh memory of torch's allocator for the current stream.
Handle allocate(const Tensor& t) {
  const auto code = std::find_if(torch->dtypes.begin(), torch->dtypes.end(),
                                 [&](const auto& entry) { return entry.second == t.dtype; });
  const bool cuda = t.device.type == DeviceType::kCuda;
  const int32_t type = cuda ? torch->cuda : torch->cpu;
  if (cuda && torch->empty_on_cuda != nullptr) {
    const auto rank = static_cast<size_t>(t.rank);
    const OptionalDevice device{static_cast<int8_t>(type), static_cast<int8_t>(t.device.index),
                                true};
    try {
      return reinterpret_cast<Handle>(
          new TensorBase(torch->empty_on_cuda({t.shape.data(), rank}, {t.strides.data(), rank},
                                              static_cast<int8_t>(code->first), device)));
    } catch (const std::exception& error) {
      const std::string_view words = error.what();  // and after the first line a stack
      Torch::fail(words.substr(0, words.find('\n')));
    }
  }
  Handle handle = nullptr;
  torch->check(torch->empty_strided(t.rank, t.shape.data(), t.strides.data(), code->first, type,
                                    t.device.index, &handle));
  return handle;
}

/// A fresh contiguous tensor.
std::pair<TorchTensor, Tensor> empty(DType dtype, std::span<const int64_t> shape, Device device) {
  Tensor t = Tensor::contiguous(nullptr, dtype, shape, device);
  TorchTensor owned(allocate(t));
  torch->check(torch->get_data_ptr(owned.get(), &t.data));
  return {std::move(owned), t};
}

std::span<const int64_t> shape_of(const ConstTensor& t) {
  return {t.shape.data(), static_cast<size_t>(t.rank)};
}

std::pair<TorchTensor, Tensor> empty_like(const ConstTensor& t) {
  return empty(t.dtype, shape_of(t), t.device);
}

/// The stream of a call on this device; sets its threads.
Run run_on(Device device, Options& options) {
  Run run;
  if (device.type == DeviceType::kCuda) {
    if (torch->current_cuda_stream == nullptr) {
      throw Error(Status::kUnavailable, "this PyTorch has no CUDA");
    }
    torch->check(torch->current_cuda_stream(device.index, &run.stream));
  } else {
    uint32_t threads = 0;
    torch->check(torch->num_threads(&threads));
    options.threads = static_cast<int>(threads);
  }
  return run;
}

void check_rank(const char* name, const ConstTensor& t) {
  if (t.rank == 3 || t.rank == 4) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: got {}, want (batch, seqlen, heads, dim) or (total, heads, dim)",
                          name, t.describe()));
}

void check_rank_of_bias(const ConstTensor& bias) {
  if (bias.rank == 4) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("bias: got {}, want (batch, hq, sq, sk)", bias.describe()));
}

/// Dropout's numbers are there wherever a call may drop, and count where it does.
template <class Args>
void check_rng_state(Args& args, const Options& options) {
  if (options.dropout_p == 0) {
    args.rng_state = {};
  } else if (!args.rng_state.given()) {
    throw Error(Status::kInvalidArgument, "rng_state: not given, want seed and offset of dropout");
  }
}

// Which tensors of a call an operator takes.

using Takes = bool(const TensorRule&);

bool inputs_with_gradient(const TensorRule& rule) { return inputs(rule) && with_gradient(rule); }

/// The tensors that an operator takes of a call.
template <class Args, Takes takes>
class Handles {
 public:
  /// Those that a call must give, or those that it may.
  template <class In>
  void read(In& in, bool must) {
    size_t i = 0;
    const auto visit = [&](const TensorRule& rule, auto&) {
      Handle& handle = handles_[i++];
      if (!takes(rule) || must != (rule.need != Need::kOptional)) return;
      handle = must ? in.tensor(rule) : in.optional_tensor(rule);
    };
    Args args;
    for_each_tensor(visit, args);
  }
  Args args() const {
    Args args;
    size_t i = 0;
    const auto visit = [&](const TensorRule& rule, auto& t) { t = view(rule.name, handles_[i++]); };
    for_each_tensor(visit, args);
    return args;
  }

 private:
  std::array<Handle, sizeof(Args) / sizeof(Tensor)>
      handles_{};  // as many as its table has, or more
};

/// In every schema the tensors that a call must give stand first.
template <class In, class... Tensors>
void read_tensors(In& in, Tensors&... of) {
  (of.read(in, true), ...);
  (of.read(in, false), ...);
}

/// Computes out and lse, fresh tensors, onto the stack of an operator. `v`: the values that the
/// call reads, which errors call by `name`.
void run_forward(ForwardArgs& args, const char* name, const ConstTensor& v, Options& options,
                 uint64_t* stack) {
  TorchTensor out = torch_out(args, name, v), lse = torch_lse(args);
  torch_forward(args, options);
  stack[0] = reinterpret_cast<uint64_t>(out.release());
  stack[1] = reinterpret_cast<uint64_t>(lse.release());
}

// The operators: what each reads, in the order of its schema, and computes.

template <Takes takes>
struct ForwardPass {
  static constexpr const char* kResults = "(Tensor out, Tensor lse)";

  Handles<ForwardArgs, takes> tensors;
  Options options;

  template <class In>
  explicit ForwardPass(In& in) {
    read_tensors(in, tensors);
    for_each_option(in, options);
  }
  void run(uint64_t* stack) {
    ForwardArgs args = tensors.args();
    run_forward(args, "v", args.v, options, stack);
  }
};

struct Forward : ForwardPass<inputs_with_gradient> {
  static constexpr const char* kName = "forward";
  using ForwardPass::ForwardPass;
};

struct ForwardCached : ForwardPass<inputs_and_descales> {
  static constexpr const char* kName = "forward_cached";
  using ForwardPass::ForwardPass;
};

struct ForwardInto : ForwardPass<with_gradient> {
  static constexpr const char* kName = "forward_into";
  static constexpr const char* kResults = "()";
  using ForwardPass::ForwardPass;

  void run(uint64_t*) {
    ForwardArgs args = tensors.args();
    torch_forward(args, options);
  }
};

template <Takes takes>
struct BackwardPass {
  Handles<BackwardArgs, takes> tensors;
  Options options;

  template <class In>
  explicit BackwardPass(In& in) {
    read_tensors(in, tensors);
    for_each_option(in, options);
  }
  void compute(BackwardArgs& args) {
    check_rng_state(args, options);
    const Run run = run_on(args.q.device, options);
    backward(args, options, run);
  }
};

struct Backward : BackwardPass<inputs> {
  static constexpr const char* kName = "backward";
  static constexpr const char* kResults =
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)";

  bool with_dbias = false;  ///< as large as the bias; or else it has no elements

  template <class In>
  explicit Backward(In& in) : BackwardPass(in) {
    in("with_dbias", with_dbias);
  }

  void run(uint64_t* stack) {
    BackwardArgs args = tensors.args();
    check_rank("q", args.q);
    check_rank("k", args.k);
    check_rank("v", args.v);
    auto [dq, dq_view] = empty_like(args.q);
    auto [dk, dk_view] = empty_like(args.k);
    auto [dv, dv_view] = empty_like(args.v);
    const DType sinks = args.sinks.given() ? args.sinks.dtype : args.q.dtype;
    const std::array<int64_t, 1> heads{args.sinks.numel()}, none{0};
    auto [dsinks, dsinks_view] = empty(sinks, heads, args.q.device);
    args.dq = dq_view;
    args.dk = dk_view;
    args.dv = dv_view;
    if (args.sinks.given()) args.dsinks = dsinks_view;
    if (with_dbias) check_rank_of_bias(args.bias);
    auto [dbias, dbias_view] =
        with_dbias ? empty_like(args.bias) : empty(args.q.dtype, none, args.q.device);
    if (with_dbias) args.dbias = dbias_view;
    compute(args);
    stack[0] = reinterpret_cast<uint64_t>(dq.release());
    stack[1] = reinterpret_cast<uint64_t>(dk.release());
    stack[2] = reinterpret_cast<uint64_t>(dv.release());
    stack[3] = reinterpret_cast<uint64_t>(dsinks.release());
    stack[4] = reinterpret_cast<uint64_t>(dbias.release());
  }
};

struct BackwardInto : BackwardPass<every> {
  static constexpr const char* kName = "backward_into";
  static constexpr const char* kResults = "()";
  using BackwardPass::BackwardPass;

  void run(uint64_t*) {
    BackwardArgs args = tensors.args();
    compute(args);
  }
};

struct Append {
  static constexpr const char* kName = "append";
  static constexpr const char* kResults = "()";

  Handles<AppendArgs, every> tensors;
  Options options;
  bool interleaved = false;

  template <class In>
  explicit Append(In& in) {
    read_tensors(in, tensors);
    in("interleaved", interleaved);
    for_each_mask_option(in, options);
  }
  void run(uint64_t*) {
    AppendArgs args = tensors.args();
    args.rows.rotary.interleaved = interleaved;
    const Run run = run_on(args.rows.k_cache.device, options);
    append(args, options, run);
  }
};

struct AppendForward {
  static constexpr const char* kName = "append_forward";
  static constexpr const char* kResults = "(Tensor out, Tensor lse)";

  Handles<ForwardArgs, inputs_but_keys> attention;
  Handles<NewRows, every> rows;
  Options options;
  bool interleaved = false;

  template <class In>
  explicit AppendForward(In& in) {
    read_tensors(in, attention, rows);
    in("interleaved", interleaved);
    for_each_option(in, options);
  }
  void run(uint64_t* stack) {
    ForwardArgs args = attention.args();
    args.append = rows.args();
    args.append.rotary.interleaved = interleaved;
    run_forward(args, "v_cache", args.append.v_cache, options, stack);
  }
};

template <class Operator>
void kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Operator call(in);
  call.run(stack);
}

struct Entry {
  const char* name;
  Kernel* kernel;
  std::string schema;
};

template <class Operator>
Entry entry() {
  Schema schema;
  const Operator call(schema);
  return {Operator::kName, kernel<Operator>,
          fmt::format("{}({}) -> {}", Operator::kName, schema.text(), Operator::kResults)};
}

const std::array<Entry, 7>& entries() {
  static const std::array<Entry, 7> kEntries{
      entry<Forward>(),      entry<ForwardInto>(), entry<ForwardCached>(), entry<Backward>(),
      entry<BackwardInto>(), entry<Append>(),      entry<AppendForward>()};
  return kEntries;
}

}  // namespace

bool torch_grad_enabled() { return torch->grad_enabled(); }

void DeleteTensor::operator()(OpaqueTensor* tensor) const { torch->delete_tensor_object(tensor); }

TorchTensor torch_out(ForwardArgs& args, const char* name, const ConstTensor& v) {
  check_rank("q", args.q);
  check_rank(name, v);
  const DType dtype = args.q.dtype > DType::kF64 ? DType::kBF16 : args.q.dtype;
  auto shape = args.q.shape;
  shape[args.q.rank - 1] = v.shape[v.rank - 1];
  auto [out, view] = empty(dtype, {shape.data(), static_cast<size_t>(args.q.rank)}, args.q.device);
  args.out = view;
  return std::move(out);
}

TorchTensor torch_lse(ForwardArgs& args) {
  const DType dtype = args.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto& n = args.q.shape;
  const std::array<int64_t, 2> packed{n[1], n[0]};
  const std::array<int64_t, 3> batch{n[0], n[2], n[1]};
  auto [lse, view] =
      args.q.rank == 3 ? empty(dtype, packed, args.q.device) : empty(dtype, batch, args.q.device);
  args.lse = view;
  return std::move(lse);
}

bool makes_torch_objects() { return torch->wrap != nullptr; }

nanobind::object torch_object(const TorchTensor& tensor) {
  PyObject* object = torch->wrap(tensor.get());
  if (object == nullptr) throw nanobind::python_error();
  return nanobind::steal(object);
}

void torch_forward(ForwardArgs& args, Options& options) {
  check_one_dtype(args);
  check_rng_state(args, options);
  const Run run = run_on(args.q.device, options);
  forward(args, options, run);
}

std::vector<std::string> torch_schemas() {
  std::vector<std::string> schemas;
  for (const Entry& entry : entries()) schemas.push_back(entry.schema);
  return schemas;
}

void find_torch() {
  if (torch == nullptr) torch = std::make_unique<Torch>().release();
}

void register_torch_ops() {
  static bool registered = false;
  if (std::exchange(registered, true)) return;
  find_torch();
  for (const char* device : {"CPU", "CUDA"}) {
    OpaqueLibrary* library = nullptr;
    torch->check(torch->library_init_impl("fulgur", device, "python/torch_ops.cpp", 0, &library));
    for (const Entry& entry : entries()) {
      torch->check(torch->library_impl(library, entry.name, entry.kernel));
    }
  }
}

}  // namespace fulgur::python
