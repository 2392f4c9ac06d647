#include "jax_ffi.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "api/prepare.h"
#include "fulgur/fulgur.h"

namespace fulgur::python {
namespace {

using xla::DataType;

/// The operands that a call may have after those it must have, in this order: bits of the number
/// that says which are there. fulgur/jax.py has the same list.
enum Given {
  kCuSeqlensQ,
  kCuSeqlensK,
  kSequsedQ,
  kSequsedK,
  kAlibiSlopes,
  kSinks,
  kRngState,
  kPageTable,
  kPageIndptr,
  kCacheBatchIdx,
  kLeftpadK,
  kTreeMask,
  kPrefixGroups,
  kPrefixLens,
  kCuSeqlensKNew,
  kCos,
  kSin,
  kRotarySeqlens,
  kDlse
};

[[noreturn]] void fail(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

DType dtype_of(const char* name, DataType dtype) {
  switch (dtype) {
    case DataType::kF32:
      return DType::kF32;
    case DataType::kBF16:
      return DType::kBF16;
    case DataType::kF16:
      return DType::kF16;
    case DataType::kF64:
      return DType::kF64;
    case DataType::kS32:
      return DType::kI32;
    case DataType::kU32:
      break;
  }
  fail(
      fmt::format("{}: got another dtype, want float32, bfloat16, float16, float64, or int32 for "
                  "lengths",
                  name));
}

/// The numbers of an attribute, which Python makes as an array of T.
template <class T>
std::span<const T> numbers(const xla::Attributes& attributes, std::string_view name, size_t want) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    if (std::string_view(attributes.names[i]->data, attributes.names[i]->size) != name) continue;
    const auto* array = static_cast<const xla::Array*>(attributes.items[i]);
    if (attributes.types[i] == xla::kArray && array->size == want) {
      return {static_cast<const T*>(array->data), want};
    }
  }
  fail(fmt::format("{}: want an attribute of {} numbers", name, want));
}

/// Takes operands, or results, in their order.
class Reader {
 public:
  Reader(const char* what, const xla::Buffers& buffers) : what_(what), buffers_(buffers) {}

  const xla::Buffer& next() {
    if (next_ >= buffers_.size || buffers_.types[next_] != xla::kBuffer) {
      fail(fmt::format("got {} {}, want more of them, all arrays", buffers_.size, what_));
    }
    return *static_cast<const xla::Buffer*>(buffers_.items[next_++]);
  }
  bool more() const { return next_ < buffers_.size; }
  void finish() const {
    if (more()) fail(fmt::format("got {} {}, want {}", buffers_.size, what_, next_));
  }

 private:
  const char* what_;
  const xla::Buffers& buffers_;
  int64_t next_ = 0;
};

/// How the dimensions that vmap has put in front of all arrays are computed: as a part of the
/// batch, or one index after the other.
struct Mapped {
  int64_t dims = 0;
  int64_t indices = 1;  ///< of all these dimensions together
  bool folded = false;  ///< into the batch

  /// A tensor of `rank` dimensions tells how many there are in front.
  Mapped(const xla::Buffer& buffer, int64_t rank) : dims(std::max<int64_t>(buffer.rank - rank, 0)) {
    for (int64_t i = 0; i < dims; ++i) indices *= buffer.dims[i];
  }

  /// How many calls of the library.
  int64_t calls() const { return folded ? 1 : indices; }
};

/// The part of a buffer that a call takes.
Tensor view(const char* name, const xla::Buffer& buffer, Device device, const Mapped& mapped,
            int64_t call) {
  // JAX has no int64 unless it is asked for: a word comes as its two halves.
  const bool halves =
      buffer.dtype == DataType::kU32 && buffer.rank > 0 && buffer.dims[buffer.rank - 1] == 2;
  const int64_t rank = buffer.rank - mapped.dims - halves;
  if (rank < 1 || rank > Tensor::kMaxRank) {
    fail(fmt::format("{}: got {} dimensions, want 1 to {}", name, rank, int{Tensor::kMaxRank}));
  }
  std::array<int64_t, Tensor::kMaxRank> shape{};
  std::copy_n(buffer.dims + mapped.dims, rank, shape.begin());
  const DType dtype = halves ? DType::kI64 : dtype_of(name, buffer.dtype);
  if (mapped.folded) shape[0] *= mapped.indices;
  Tensor t = Tensor::contiguous(
      buffer.data, dtype, std::span<const int64_t>(shape).first(static_cast<size_t>(rank)), device);
  // Before XLA has assigned memory there is none to step through.
  if (t.data != nullptr) {
    t.data = static_cast<std::byte*>(t.data) + call * t.numel() * size_of(dtype);
  }
  return t;
}

/// What all calls have: options, and operands that may be there.
struct Shared {
  Options options;
  bool interleaved = false;
  int64_t given = 0;

  explicit Shared(const xla::Attributes& attributes) {
    const auto reals = numbers<double>(attributes, "reals", 3);
    options.scale = reals[0];
    options.softcap = reals[1];
    options.dropout_p = reals[2];
    const auto integers = numbers<int64_t>(attributes, "integers", 10);
    options.mask = {.left = integers[0], .right = integers[1], .chunk = integers[2]};
    options.max_seqlen_q = integers[3];
    options.max_seqlen_k = integers[4];
    options.deterministic = integers[5] != 0;
    options.invariant = integers[6] != 0;
    options.max_workspace = integers[7];
    interleaved = integers[8] != 0;
    given = integers[9];
  }

  bool has(Given operand) const { return (given >> operand & 1) != 0; }
};

/// Where a call computes, as XLA's call frame says.
struct Place {
  Device device;
  Run run;
};

void check(const xla::Api& api, xla::Error* error, const char* what) {
  if (error == nullptr) return;
  xla::DestroyError destroy{.struct_size = sizeof(destroy), .extensions = nullptr, .error = error};
  api.destroy_error(&destroy);
  throw Error(Status::kInternal, fmt::format("XLA gives no {}", what));
}

Place place_of(const xla::CallFrame& frame, DeviceType type, Options& options) {
  const xla::Api& api = *frame.api;
  Place place;
  if (type == DeviceType::kCpu) {
    int64_t threads = 0;
    xla::GetThreads ask{.struct_size = sizeof(ask),
                        .extensions = nullptr,
                        .context = frame.context,
                        .threads = &threads};
    check(api, api.get_threads(&ask), "number of threads");
    options.threads = static_cast<int>(std::clamp<int64_t>(threads, 1, 1024));
    return place;
  }
  xla::GetDevice ask_device{};
  ask_device.struct_size = sizeof(ask_device);
  ask_device.context = frame.context;
  check(api, api.get_device(&ask_device), "device");
  place.device = {type, ask_device.device};
  xla::GetStream ask_stream{};
  ask_stream.struct_size = sizeof(ask_stream);
  ask_stream.context = frame.context;
  check(api, api.get_stream(&ask_stream), "stream");
  place.run.stream = ask_stream.stream;
  return place;
}

/// What both passes have.
struct Pass {
  /// `q` may be any operand with its first dimensions.
  static Mapped mapped(const Shared& shared, const xla::Buffer& q) {
    const bool packed = shared.has(kCuSeqlensQ);
    Mapped mapped(q, packed ? 3 : 4);
    // What dropout keeps depends on the place in the batch, which has to stay what it is; a batch
    // has one sink for each head; and tables name places of the cache with them.
    mapped.folded = mapped.dims > 0 && !packed && !shared.has(kRngState) && !shared.has(kSinks) &&
                    !shared.has(kPageTable) && !shared.has(kCacheBatchIdx);
    return mapped;
  }

  template <class Args, class View>
  static void read_optional(Args& args, const Shared& shared, View& next) {
    if (shared.has(kCuSeqlensQ)) args.lengths.cu_seqlens_q = next("cu_seqlens_q");
    if (shared.has(kCuSeqlensK)) args.lengths.cu_seqlens_k = next("cu_seqlens_k");
    if (shared.has(kSequsedQ)) args.lengths.seqused_q = next("seqused_q");
    if (shared.has(kSequsedK)) args.lengths.seqused_k = next("seqused_k");
    if (shared.has(kAlibiSlopes)) args.alibi_slopes = next("alibi_slopes");
    if (shared.has(kSinks)) args.sinks = next("sinks");
    if (shared.has(kRngState)) args.rng_state = next("rng_state");
  }
};

/// Where the sequences of a cache lie.
template <class View>
void read_tables(fulgur::KvCache& cache, const Shared& shared, View& next) {
  if (shared.has(kPageTable)) cache.page_table = next("page_table");
  if (shared.has(kPageIndptr)) cache.page_indptr = next("page_indptr");
  if (shared.has(kCacheBatchIdx)) cache.cache_batch_idx = next("cache_batch_idx");
}

/// What the forward pass alone takes after them.
template <class View>
void read_others(ForwardArgs& args, const Shared& shared, View& next) {
  if (shared.has(kLeftpadK)) args.cache.leftpad_k = next("leftpad_k");
  if (shared.has(kTreeMask)) args.tree_mask = next("tree_mask");
  if (shared.has(kPrefixGroups)) args.shared_prefix.prefix_groups = next("prefix_groups");
  if (shared.has(kPrefixLens)) args.shared_prefix.prefix_lens = next("prefix_lens");
}

struct Forward : Pass {
  using Args = ForwardArgs;
  static constexpr const char* kTarget = "fulgur_forward";

  template <class View>
  static Args read(const Shared& shared, View operand, View result, int64_t results) {
    Args args{.q = operand("q"), .k = operand("k"), .v = operand("v")};
    read_optional(args, shared, operand);
    read_tables(args.cache, shared, operand);
    read_others(args, shared, operand);
    args.out = result("out");
    if (results > 1) args.lse = result("lse");
    return args;
  }
  static void run(const Args& args, const Options& options, const Run& run) {
    forward(args, options, run);
  }
};

struct Backward : Pass {
  using Args = BackwardArgs;
  static constexpr const char* kTarget = "fulgur_backward";

  template <class View>
  static Args read(const Shared& shared, View operand, View result, int64_t) {
    Args args{.dout = operand("dout"),
              .q = operand("q"),
              .k = operand("k"),
              .v = operand("v"),
              .out = operand("out"),
              .lse = operand("lse")};
    read_optional(args, shared, operand);
    if (shared.has(kDlse)) args.dlse = operand("dlse");
    args.dq = result("dq");
    args.dk = result("dk");
    args.dv = result("dv");
    if (shared.has(kSinks)) args.dsinks = result("dsinks");
    return args;
  }
  static void run(const Args& args, const Options& options, const Run& run) {
    backward(args, options, run);
  }
};

/// What both calls have that write new rows: their results lie in the memory of the first operands,
/// as the call has asked XLA for.
struct Rows {
  static Mapped mapped(const Shared&, const xla::Buffer& k_cache) { return {k_cache, 4}; }

  template <class View>
  static fulgur::NewRows read_caches(View& operand, View& result) {
    result("k_cache");
    result("v_cache");
    return {.k_cache = operand("k_cache"), .v_cache = operand("v_cache")};
  }
  template <class View>
  static void read_new(fulgur::NewRows& rows, View& operand) {
    rows.k_new = operand("k_new");
    rows.v_new = operand("v_new");
    rows.cache_seqlens = operand("cache_seqlens");
  }
  template <class View>
  static void read_positions(fulgur::NewRows& rows, const Shared& shared, View& operand) {
    if (shared.has(kCuSeqlensKNew)) rows.cu_seqlens_k_new = operand("cu_seqlens_k_new");
    if (shared.has(kCos)) rows.rotary.cos = operand("cos");
    if (shared.has(kSin)) rows.rotary.sin = operand("sin");
    if (shared.has(kRotarySeqlens)) rows.rotary.rotary_seqlens = operand("rotary_seqlens");
    rows.rotary.interleaved = shared.interleaved;
  }
};

struct Append : Rows {
  using Args = AppendArgs;
  static constexpr const char* kTarget = "fulgur_append";

  template <class View>
  static Args read(const Shared& shared, View operand, View result, int64_t results) {
    Args args{.rows = read_caches(operand, result)};
    if (results > 2) {
      args.q = operand("q");
      args.q_out = result("q");
    }
    read_new(args.rows, operand);
    if (shared.has(kCuSeqlensQ)) args.cu_seqlens_q = operand("cu_seqlens_q");
    read_tables(args.cache, shared, operand);
    read_positions(args.rows, shared, operand);
    return args;
  }
  static void run(const Args& args, const Options& options, const Run& run) {
    append(args, options, run);
  }
};

/// Appends and attends.
struct AppendForward : Rows {
  using Args = ForwardArgs;
  static constexpr const char* kTarget = "fulgur_append_forward";

  template <class View>
  static Args read(const Shared& shared, View operand, View result, int64_t results) {
    Args args{.append = read_caches(operand, result)};
    args.q = operand("q");
    read_new(args.append, operand);
    Pass::read_optional(args, shared, operand);
    read_tables(args.cache, shared, operand);
    read_others(args, shared, operand);
    read_positions(args.append, shared, operand);
    args.out = result("out");
    if (results > 3) args.lse = result("lse");
    return args;
  }
  static void run(const Args& args, const Options& options, const Run& run) {
    forward(args, options, run);
  }
};

template <class Call>
void call(const xla::CallFrame& frame, DeviceType type) {
  Shared shared(frame.attributes);
  const Place place = place_of(frame, type, shared.options);
  const Mapped mapped = Call::mapped(shared, Reader("operands", frame.operands).next());
  const bool prepares = frame.stage == xla::Stage::kInitialize;
  for (int64_t n = 0; n < mapped.calls(); ++n) {
    Reader operands("operands", frame.operands), results("results", frame.results);
    const auto next = [&](Reader& from) {
      return [&, place, n](const char* name) {
        return view(name, from.next(), place.device, mapped, n);
      };
    };
    const auto args = Call::read(shared, next(operands), next(results), frame.results.size);
    operands.finish();
    results.finish();
    if (prepares) {
      prepare(args, shared.options);
      return;  // the others have the same shape
    }
    Call::run(args, shared.options, place.run);
  }
}

xla::Error* error_of(const xla::CallFrame& frame, const char* message, Status status) {
  const auto code = [&] {
    switch (status) {
      case Status::kInvalidArgument:
        return xla::ErrorCode::kInvalidArgument;
      case Status::kUnsupported:
        return xla::ErrorCode::kUnimplemented;
      case Status::kUnavailable:
        return xla::ErrorCode::kUnavailable;
      case Status::kOutOfMemory:
        return xla::ErrorCode::kResourceExhausted;
      default:
        return xla::ErrorCode::kInternal;
    }
  }();
  xla::MakeError make{
      .struct_size = sizeof(make), .extensions = nullptr, .message = message, .code = code};
  return frame.api->make_error(&make);
}

/// Answers XLA's question what the handler is, if this is that question.
bool answered(const xla::CallFrame& frame, DeviceType type) {
  for (auto* extension = frame.extensions; extension != nullptr; extension = extension->next) {
    if (extension->type != xla::kMetadataExtension) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
    metadata.api_version.major = xla::kMajorVersion;
    metadata.api_version.minor = xla::kMinorVersion;
    // A run on a device launches kernels and nothing else, and they read the lengths.
    metadata.traits = type == DeviceType::kCuda ? xla::kCommandBufferCompatible : 0;
    return true;
  }
  return false;
}

template <class Call, DeviceType type>
xla::Error* handle(xla::CallFrame* frame) {
  if (answered(*frame, type)) return nullptr;
  try {
    call<Call>(*frame, type);
    return nullptr;
  } catch (const Error& error) {
    return error_of(*frame, error.what(), error.status());
  } catch (const std::bad_alloc&) {
    return error_of(*frame, "out of memory", Status::kOutOfMemory);
  } catch (const std::exception& error) {
    return error_of(*frame, error.what(), Status::kInternal);
  }
}

}  // namespace

const JaxHandler (&jax_handlers())[kJaxHandlers] {
  constexpr auto kCpu = DeviceType::kCpu, kCuda = DeviceType::kCuda;
  // On CUDA the plan is made, or append's kernel loaded, before XLA captures the call.
  static constexpr JaxHandler kHandlers[kJaxHandlers] = {
      {Forward::kTarget, "cpu", "execute", handle<Forward, kCpu>},
      {Backward::kTarget, "cpu", "execute", handle<Backward, kCpu>},
      {Append::kTarget, "cpu", "execute", handle<Append, kCpu>},
      {AppendForward::kTarget, "cpu", "execute", handle<AppendForward, kCpu>},
      {Forward::kTarget, "CUDA", "initialize", handle<Forward, kCuda>},
      {Forward::kTarget, "CUDA", "execute", handle<Forward, kCuda>},
      {Backward::kTarget, "CUDA", "initialize", handle<Backward, kCuda>},
      {Backward::kTarget, "CUDA", "execute", handle<Backward, kCuda>},
      {Append::kTarget, "CUDA", "initialize", handle<Append, kCuda>},
      {Append::kTarget, "CUDA", "execute", handle<Append, kCuda>},
      {AppendForward::kTarget, "CUDA", "initialize", handle<AppendForward, kCuda>},
      {AppendForward::kTarget, "CUDA", "execute", handle<AppendForward, kCuda>},
  };
  return kHandlers;
}

}  // namespace fulgur::python
