#include "jax_ffi.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "api/prepare.h"
#include "calls.h"
#include "fulgur/fulgur.h"

namespace fulgur::python {
namespace {

using xla::DataType;

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
    case DataType::kPred:
      return DType::kBool;
    case DataType::kF8E4M3FN:
      return DType::kE4M3;
    case DataType::kF8E5M2:
      return DType::kE5M2;
    case DataType::kS8:
      return DType::kInt8;
    case DataType::kU32:
      break;
  }
  fail(fmt::format(
      "{}: got another dtype, want float32, bfloat16, float16, float64, a float8 or int8, "
      "int32 for lengths, or bool for a bias",
      name));
}

/// Takes the numbers of an attribute, which Python makes as an array of T, in their order.
template <class T>
class Numbers {
 public:
  Numbers(const xla::Attributes& attributes, std::string_view name) {
    for (int64_t i = 0; i < attributes.size; ++i) {
      const auto& [data, size] = *attributes.names[i];
      if (std::string_view(data, size) != name || attributes.types[i] != xla::kArray) continue;
      const auto* array = static_cast<const xla::Array*>(attributes.items[i]);
      numbers_ = {static_cast<const T*>(array->data), array->size};
    }
  }
  T next() {
    if (next_ == numbers_.size()) fail(fmt::format("got {} numbers, want more of them", next_));
    return numbers_[next_++];
  }
  std::span<const T> all() const { return numbers_; }

 private:
  std::span<const T> numbers_;
  size_t next_ = 0;
};

/// The texts of an attribute, which Python makes as an array of bytes with 0 between them.
std::vector<std::string> texts_of(const xla::Attributes& attributes, std::string_view name) {
  std::vector<std::string> texts;
  const std::span<const char> all = Numbers<char>(attributes, name).all();
  if (all.empty()) return texts;
  texts.emplace_back();
  for (const char c : all) {
    if (c == 0) {
      texts.emplace_back();
    } else {
      texts.back() += c;
    }
  }
  return texts;
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

  /// The mapped dimensions are those in front of the last `rank`.
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

/// What all calls have: options, and which of the tensors that they may have are there.
struct Shared {
  Options options;
  bool interleaved = false;
  int64_t given = -1;  ///< a bit for each Arg
  /// score_mod and mask_mod, where one is given; the tensors that they index, and of these those
  /// whose gradients are wanted.
  std::vector<std::string> mods{}, tensors{}, gradients{};

  /// Every tensor is there.
  Shared() = default;
  explicit Shared(const xla::Attributes& attributes) {
    Numbers<double> reals(attributes, "reals");
    Numbers<int64_t> integers(attributes, "integers");
    const auto read = [&](const char*, auto& to) {
      using To = std::remove_reference_t<decltype(to)>;
      if constexpr (std::is_integral_v<To>) {
        to = static_cast<To>(integers.next());
      } else {
        to = reals.next();
      }
    };
    for_each_option(read, options);
    interleaved = integers.next() != 0;
    given = integers.next();
    mods = texts_of(attributes, "mods");
    tensors = texts_of(attributes, "tensors");
    gradients = texts_of(attributes, "dtensors");
  }

  bool has(Arg arg) const { return (given >> static_cast<int>(arg) & 1) != 0; }
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

/// Takes tensors of a call from its operands, or from its results, in the order of their table.
template <class Args, class View>
void read(Args& args, const Shared& shared, bool (*takes)(const TensorRule&), View& next) {
  const auto visit = [&](const TensorRule& rule, auto& t) {
    if (takes(rule) && (rule.need != Need::kOptional || shared.has(rule.arg))) t = next(rule.name);
  };
  for_each_tensor(visit, args);
}

/// The tensors of expressions and their gradients, which come after all others, and the
/// expressions.
template <class View>
void read_expressions(const Shared& shared, std::vector<TensorBinding>& tensors, Options& options,
                      View operand, View result) {
  std::vector<TensorSymbol> symbols;
  for (const std::string& name : shared.tensors) {
    const Tensor t = operand(name.c_str());
    const bool wanted = std::ranges::find(shared.gradients, name) != shared.gradients.end();
    tensors.push_back({name, t, wanted ? result(name.c_str()) : Tensor{}});
    symbols.emplace_back(name, t.dtype, t.rank);
  }
  if (shared.mods.empty()) return;
  const auto parsed = [&](const std::string& text) {
    return text.empty() ? Expr() : parse_expression(text, symbols);
  };
  options.score_mod = parsed(shared.mods.front());
  options.mask_mod = parsed(shared.mods.back());
}

/// What both passes have.
template <class Arguments>
struct Pass {
  using Args = Arguments;

  /// The first operand has the first dimensions of q.
  static Mapped mapped(const Shared& shared, const xla::Buffer& first) {
    const bool packed = shared.has(Arg::kCuSeqlensQ);
    Mapped mapped(first, packed ? 3 : 4);
    // What dropout keeps depends on the place in the batch, which has to stay what it is, as in
    // expressions; a batch
    // has one sink for each head and one bias; tables name places of the cache with them; and a
    // descale may be one for all.
    mapped.folded = mapped.dims > 0 && !packed && !shared.has(Arg::kRngState) &&
                    !shared.has(Arg::kSinks) && !shared.has(Arg::kBias) && shared.mods.empty() &&
                    !shared.has(Arg::kPageTable) && !shared.has(Arg::kCacheBatchIdx) &&
                    !shared.has(Arg::kQDescale) && !shared.has(Arg::kKDescale) &&
                    !shared.has(Arg::kVDescale) && !shared.has(Arg::kKMean);
    return mapped;
  }
  template <class View>
  static Args read(const Shared& shared, View operand, View result) {
    Args args;
    python::read(args, shared, inputs_and_descales, operand);
    python::read(args, shared, outputs, result);
    return args;
  }
};

struct Forward : Pass<ForwardArgs> {
  static constexpr const char* kTarget = "fulgur_forward";

  static void run(const Args& args, const Options& options, const Run& run) {
    check_one_dtype(args);
    forward(args, options, run);
  }
};

struct Backward : Pass<BackwardArgs> {
  static constexpr const char* kTarget = "fulgur_backward";

  static void run(const Args& args, const Options& options, const Run& run) {
    backward(args, options, run);
  }
};

/// What both calls that write new rows have in common. The caches, and q where it is rotated, are
/// operands whose memory XLA also uses for results, because the call has declared these aliases.
struct Rows {
  static Mapped mapped(const Shared&, const xla::Buffer& k_cache) { return {k_cache, 4}; }
};

struct Append : Rows {
  using Args = AppendArgs;
  static constexpr const char* kTarget = "fulgur_append";

  template <class View>
  static Args read(const Shared& shared, View operand, View result) {
    const auto operands = [](const TensorRule& rule) {
      return every(rule) && rule.arg != Arg::kQOut;
    };
    Args args;
    python::read(args, shared, operands, operand);
    python::read(args, shared, outputs, result);
    args.rows.rotary.interleaved = shared.interleaved;
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
  static Args read(const Shared& shared, View operand, View result) {
    Args args;
    python::read(args.append, shared, every, operand);
    python::read(args, shared, inputs_but_keys, operand);
    python::read(args.append, shared, outputs, result);
    python::read(args, shared, outputs, result);
    args.append.rotary.interleaved = shared.interleaved;
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
    auto args = Call::read(shared, next(operands), next(results));
    if constexpr (requires { args.tensors; }) {
      read_expressions(shared, args.tensors, shared.options, next(operands), next(results));
    }
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

/// The names of a call's operands and results.
template <class Call>
JaxCall names_of() {
  JaxCall call{.target = Call::kTarget};
  const auto record = [](std::vector<std::string>& names) {
    return [&](const char* name) {
      names.emplace_back(name);
      return Tensor{};
    };
  };
  Call::read(Shared(), record(call.operands), record(call.results));
  return call;
}

}  // namespace

std::vector<JaxCall> jax_calls() {
  return {names_of<Forward>(), names_of<Backward>(), names_of<Append>(), names_of<AppendForward>()};
}

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
