#include "torch_ops.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/fulgur.h"

namespace fulgur::python {
namespace {

// torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h, as far as it is used.

struct OpaqueTensor;
using Handle = OpaqueTensor*;
struct OpaqueLibrary;
using Kernel = void(uint64_t* stack, uint64_t arguments, uint64_t results);

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
  LoadedLibrary cpu_library{"libtorch_cpu.so"}, cuda_library{"libtorch_cuda.so"};

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
  int32_t (*num_threads)(uint32_t*) =
      cpu_library.function<int32_t(uint32_t*)>("torch_get_num_threads");
  /// Null before PyTorch 2.13, which deletes with C++'s own operator.
  int32_t (*delete_value)(uint64_t*) =
      cpu_library.optional<int32_t(uint64_t*)>("torch_delete_stable_ivalue");
  /// Null where failures of the shim leave no words.
  const char* (*what)() =
      cpu_library.optional<const char*()>("torch_exception_get_what_without_backtrace");

  int32_t cpu = constant("device_type_cpu"), cuda = constant("device_type_cuda");
  std::vector<std::pair<int32_t, DType>> dtypes{
      {constant("dtype_float32"), DType::kF32}, {constant("dtype_bfloat16"), DType::kBF16},
      {constant("dtype_float16"), DType::kF16}, {constant("dtype_float64"), DType::kF64},
      {constant("dtype_int32"), DType::kI32},   {constant("dtype_int64"), DType::kI64}};

  int32_t constant(const char* name) const {
    return cpu_library.function<int32_t()>((std::string("aoti_torch_") + name).c_str())();
  }
  void check(int32_t failed) const {
    if (failed == 0) return;
    const char* words = what == nullptr ? nullptr : what();
    throw Error(Status::kInternal,
                fmt::format("PyTorch failed: {}", words == nullptr ? "no reason given" : words));
  }
};

/// Set by register_torch_ops(), before any kernel can run, and never destroyed.
const Torch* torch = nullptr;

struct DeleteTensor {
  void operator()(Handle handle) const { torch->delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<OpaqueTensor, DeleteTensor>;

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

  Handle tensor() { return owned_.emplace_back(reinterpret_cast<Handle>(*next_++)).get(); }
  Handle optional_tensor() {
    const auto value = optional();
    if (value == nullptr) return nullptr;
    return owned_.emplace_back(reinterpret_cast<Handle>(*value)).get();
  }
  std::optional<double> optional_real() {
    const auto value = optional();
    if (value == nullptr) return std::nullopt;
    return std::bit_cast<double>(*value);
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  double real() { return std::bit_cast<double>(*next_++); }
  bool boolean() { return (*next_++ & 1) != 0; }

 private:
  std::unique_ptr<uint64_t, DeleteValue> optional() {
    return std::unique_ptr<uint64_t, DeleteValue>(reinterpret_cast<uint64_t*>(*next_++));
  }

  const uint64_t* next_;
  std::vector<Owned> owned_;
};

DType dtype_of(const char* name, Handle handle) {
  int32_t dtype = 0;
  torch->check(torch->get_dtype(handle, &dtype));
  for (const auto& [code, type] : torch->dtypes) {
    if (code == dtype) return type;
  }
  throw Error(
      Status::kInvalidArgument,
      fmt::format("{}: got another dtype, want float32, bfloat16, float16, float64, or int32 "
                  "for lengths",
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

/// A fresh contiguous tensor, of torch's allocator for the current stream.
std::pair<Owned, Tensor> empty(DType dtype, std::initializer_list<int64_t> shape, Device device) {
  Tensor t = Tensor::contiguous(nullptr, dtype, shape, device);
  const auto code = std::find_if(torch->dtypes.begin(), torch->dtypes.end(),
                                 [&](const auto& entry) { return entry.second == dtype; });
  Handle handle = nullptr;
  torch->check(torch->empty_strided(t.rank, t.shape.data(), t.strides.data(), code->first,
                                    device.type == DeviceType::kCpu ? torch->cpu : torch->cuda,
                                    device.index, &handle));
  Owned owned(handle);
  torch->check(torch->get_data_ptr(handle, &t.data));
  return {std::move(owned), t};
}

std::pair<Owned, Tensor> empty_like(const ConstTensor& t) {
  if (t.rank == 3) return empty(t.dtype, {t.shape[0], t.shape[1], t.shape[2]}, t.device);
  return empty(t.dtype, {t.shape[0], t.shape[1], t.shape[2], t.shape[3]}, t.device);
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

/// What both passes take after their tensors, in the order of the schemas in fulgur/torch.py.
struct Shared {
  Handle cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, rng_state;
  Options options;

  explicit Shared(Arguments& in) {
    sinks = in.optional_tensor();
    cu_seqlens_q = in.optional_tensor();
    cu_seqlens_k = in.optional_tensor();
    seqused_q = in.optional_tensor();
    seqused_k = in.optional_tensor();
    alibi_slopes = in.optional_tensor();
    rng_state = in.optional_tensor();
    options.max_seqlen_q = in.integer();
    options.max_seqlen_k = in.integer();
    options.mask.left = in.integer();
    options.mask.right = in.integer();
    options.mask.chunk = in.integer();
    options.scale = in.optional_real();
    options.softcap = in.real();
    options.dropout_p = in.real();
    options.invariant = in.boolean();
    options.max_workspace = in.integer();
  }

  template <class Args>
  void fill(Args& args) const {
    args.lengths.cu_seqlens_q = view("cu_seqlens_q", cu_seqlens_q);
    args.lengths.cu_seqlens_k = view("cu_seqlens_k", cu_seqlens_k);
    args.lengths.seqused_q = view("seqused_q", seqused_q);
    args.lengths.seqused_k = view("seqused_k", seqused_k);
    args.alibi_slopes = view("alibi_slopes", alibi_slopes);
    args.sinks = view("sinks", sinks);
    if (options.dropout_p == 0) return;
    if (rng_state == nullptr) {
      throw Error(Status::kInvalidArgument,
                  "rng_state: not given, want seed and offset of dropout");
    }
    args.rng_state = view("rng_state", rng_state);
  }

  Run run(Device device) { return run_on(device, options); }
};

void check_rank(const char* name, const ConstTensor& t) {
  if (t.rank == 3 || t.rank == 4) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: got {}, want (batch, seqlen, heads, dim) or (total, heads, dim)",
                          name, t.describe()));
}

/// What all operators of the forward pass take; `out` and `lse` where the caller has them, new rows
/// of k and v and the lengths before them where they are appended.
struct Forward {
  enum class Besides : uint8_t { kNothing, kResults, kRows };

  Handle q, k, v, out = nullptr, lse = nullptr;
  Handle k_new = nullptr, v_new = nullptr, cache_seqlens = nullptr;
  Shared shared;

  Forward(Arguments& in, Besides besides)
      : q(in.tensor()),
        k(in.tensor()),
        v(in.tensor()),
        out(besides == Besides::kResults ? in.tensor() : nullptr),
        lse(besides == Besides::kResults ? in.tensor() : nullptr),
        k_new(besides == Besides::kRows ? in.tensor() : nullptr),
        v_new(besides == Besides::kRows ? in.tensor() : nullptr),
        cache_seqlens(besides == Besides::kRows ? in.tensor() : nullptr),
        shared(in) {}

  ForwardArgs args() const {
    ForwardArgs args{.q = view("q", q),
                     .k = view("k", k),
                     .v = view("v", v),
                     .out = view("out", out),
                     .lse = view("lse", lse)};
    shared.fill(args);
    return args;
  }
  void run(const ForwardArgs& args) {
    const Run run = shared.run(args.q.device);
    forward(args, shared.options, run);
  }
};

/// Computes, and leaves fresh results on the stack. `v` is the call's.
void run_forward(Forward& call, ForwardArgs& args, const ConstTensor& v, uint64_t* stack) {
  const ConstTensor& q = args.q;
  check_rank("q", q);
  check_rank("v", v);
  const bool packed = q.rank == 3;
  const int64_t dv = v.shape[v.rank - 1];
  const DType lse_dtype = q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto& n = q.shape;
  auto [out, out_view] = packed ? empty(q.dtype, {n[0], n[1], dv}, q.device)
                                : empty(q.dtype, {n[0], n[1], n[2], dv}, q.device);
  auto [lse, lse_view] = packed ? empty(lse_dtype, {n[1], n[0]}, q.device)
                                : empty(lse_dtype, {n[0], n[2], n[1]}, q.device);
  args.out = out_view;
  args.lse = lse_view;
  call.run(args);
  stack[0] = reinterpret_cast<uint64_t>(out.release());
  stack[1] = reinterpret_cast<uint64_t>(lse.release());
}

void forward_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Forward call(in, Forward::Besides::kNothing);
  ForwardArgs args = call.args();
  run_forward(call, args, args.v, stack);
}

/// What reading a cache may take besides, in the order of the schemas.
struct Cache {
  Handle page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens;

  explicit Cache(Arguments& in)
      : page_table(in.optional_tensor()),
        page_indptr(in.optional_tensor()),
        cache_batch_idx(in.optional_tensor()),
        leftpad_k(in.optional_tensor()),
        tree_mask(in.optional_tensor()),
        prefix_groups(in.optional_tensor()),
        prefix_lens(in.optional_tensor()) {}

  void fill(ForwardArgs& args) const {
    args.cache = {.page_table = view("page_table", page_table),
                  .page_indptr = view("page_indptr", page_indptr),
                  .cache_batch_idx = view("cache_batch_idx", cache_batch_idx),
                  .leftpad_k = view("leftpad_k", leftpad_k)};
    args.tree_mask = view("tree_mask", tree_mask);
    args.shared_prefix = {.prefix_groups = view("prefix_groups", prefix_groups),
                          .prefix_lens = view("prefix_lens", prefix_lens)};
  }
};

void forward_cached_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Forward call(in, Forward::Besides::kNothing);
  const Cache cache(in);
  ForwardArgs args = call.args();
  cache.fill(args);
  run_forward(call, args, args.v, stack);
}

void append_forward_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Forward call(in, Forward::Besides::kRows);
  const Cache cache(in);
  const Handle cu_seqlens_k_new = in.optional_tensor();
  const Handle cos = in.optional_tensor(), sin = in.optional_tensor();
  const bool interleaved = in.boolean();
  const Handle rotary_seqlens = in.optional_tensor();
  ForwardArgs args = call.args();
  cache.fill(args);
  args.k = args.v = {};
  args.append = {.k_cache = view("k_cache", call.k),
                 .v_cache = view("v_cache", call.v),
                 .k_new = view("k_new", call.k_new),
                 .v_new = view("v_new", call.v_new),
                 .cu_seqlens_k_new = view("cu_seqlens_k_new", cu_seqlens_k_new),
                 .cache_seqlens = view("cache_seqlens", call.cache_seqlens),
                 .rotary = {.cos = view("cos", cos),
                            .sin = view("sin", sin),
                            .rotary_seqlens = view("rotary_seqlens", rotary_seqlens),
                            .interleaved = interleaved}};
  run_forward(call, args, args.append.v_cache, stack);
}

void forward_into_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Forward call(in, Forward::Besides::kResults);
  call.run(call.args());
}

/// What both operators of the backward pass take; dq, dk and dv where the caller has them.
struct Backward {
  Handle dout, q, k, v, out, lse, dq = nullptr, dk = nullptr, dv = nullptr, dlse;
  Shared shared;

  Backward(Arguments& in, bool with_results)
      : dout(in.tensor()),
        q(in.tensor()),
        k(in.tensor()),
        v(in.tensor()),
        out(in.tensor()),
        lse(in.tensor()),
        dq(with_results ? in.tensor() : nullptr),
        dk(with_results ? in.tensor() : nullptr),
        dv(with_results ? in.tensor() : nullptr),
        dlse(in.optional_tensor()),
        shared(in) {
    shared.options.deterministic = in.boolean();
  }

  BackwardArgs args() const {
    BackwardArgs args{.dout = view("dout", dout),
                      .q = view("q", q),
                      .k = view("k", k),
                      .v = view("v", v),
                      .out = view("out", out),
                      .lse = view("lse", lse),
                      .dq = view("dq", dq),
                      .dk = view("dk", dk),
                      .dv = view("dv", dv),
                      .dlse = view("dlse", dlse)};
    shared.fill(args);
    return args;
  }
  void run(const BackwardArgs& args) {
    const Run run = shared.run(args.q.device);
    backward(args, shared.options, run);
  }
};

void backward_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Backward call(in, false);
  BackwardArgs args = call.args();
  check_rank("q", args.q);
  check_rank("k", args.k);
  check_rank("v", args.v);
  auto [dq, dq_view] = empty_like(args.q);
  auto [dk, dk_view] = empty_like(args.k);
  auto [dv, dv_view] = empty_like(args.v);
  auto [dsinks, dsinks_view] = empty(DType::kF32, {args.sinks.numel()}, args.q.device);
  args.dq = dq_view;
  args.dk = dk_view;
  args.dv = dv_view;
  if (args.sinks.given()) args.dsinks = dsinks_view;
  call.run(args);
  stack[0] = reinterpret_cast<uint64_t>(dq.release());
  stack[1] = reinterpret_cast<uint64_t>(dk.release());
  stack[2] = reinterpret_cast<uint64_t>(dv.release());
  stack[3] = reinterpret_cast<uint64_t>(dsinks.release());
}

void backward_into_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Backward call(in, true);
  const Handle dsinks = in.optional_tensor();
  BackwardArgs args = call.args();
  args.dsinks = view("dsinks", dsinks);
  call.run(args);
}

void append_kernel(uint64_t* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Handle k_cache = in.tensor(), v_cache = in.tensor(), k_new = in.tensor();
  const Handle v_new = in.tensor(), cache_seqlens = in.tensor();
  const Handle cu_seqlens_k_new = in.optional_tensor(), page_table = in.optional_tensor();
  const Handle page_indptr = in.optional_tensor(), cache_batch_idx = in.optional_tensor();
  const Handle cos = in.optional_tensor(), sin = in.optional_tensor();
  const bool interleaved = in.boolean();
  const Handle rotary_seqlens = in.optional_tensor(), q = in.optional_tensor();
  const Handle q_out = in.optional_tensor(), cu_seqlens_q = in.optional_tensor();
  Options options;
  options.mask.left = in.integer();
  options.mask.right = in.integer();
  options.mask.chunk = in.integer();
  const AppendArgs args{
      .rows = {.k_cache = view("k_cache", k_cache),
               .v_cache = view("v_cache", v_cache),
               .k_new = view("k_new", k_new),
               .v_new = view("v_new", v_new),
               .cu_seqlens_k_new = view("cu_seqlens_k_new", cu_seqlens_k_new),
               .cache_seqlens = view("cache_seqlens", cache_seqlens),
               .rotary = {.cos = view("cos", cos),
                          .sin = view("sin", sin),
                          .rotary_seqlens = view("rotary_seqlens", rotary_seqlens),
                          .interleaved = interleaved}},
      .cache = {.page_table = view("page_table", page_table),
                .page_indptr = view("page_indptr", page_indptr),
                .cache_batch_idx = view("cache_batch_idx", cache_batch_idx)},
      .q = view("q", q),
      .q_out = view("q_out", q_out),
      .cu_seqlens_q = view("cu_seqlens_q", cu_seqlens_q)};
  const Run run = run_on(args.rows.k_cache.device, options);
  append(args, options, run);
}

}  // namespace

void register_torch_ops() {
  if (torch != nullptr) return;
  auto found = std::make_unique<Torch>();
  torch = found.release();
  for (const char* device : {"CPU", "CUDA"}) {
    OpaqueLibrary* library = nullptr;
    torch->check(torch->library_init_impl("fulgur", device, "python/torch_ops.cpp", 0, &library));
    torch->check(torch->library_impl(library, "forward", forward_kernel));
    torch->check(torch->library_impl(library, "forward_into", forward_into_kernel));
    torch->check(torch->library_impl(library, "forward_cached", forward_cached_kernel));
    torch->check(torch->library_impl(library, "backward", backward_kernel));
    torch->check(torch->library_impl(library, "backward_into", backward_into_kernel));
    torch->check(torch->library_impl(library, "append", append_kernel));
    torch->check(torch->library_impl(library, "append_forward", append_forward_kernel));
  }
}

}  // namespace fulgur::python
