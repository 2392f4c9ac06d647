#include "fulgur/c.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/c_struct.h"
#include "call/tensors.h"
#include "expression/graph.h"
#include "fulgur/append.h"
#include "fulgur/attention.h"
#include "fulgur/codes/hadamard.h"
#include "fulgur/cuda.h"
#include "fulgur/distributed/plan.h"
#include "fulgur/error.h"
#include "fulgur/merge.h"
#include "fulgur/scores.h"
#include "fulgur/version.h"

struct fulgur_plan {
  fulgur::Plan plan;
};

struct fulgur_group {
  fulgur::Group group;
};

namespace {

using fulgur::AppendArgs, fulgur::BackwardArgs, fulgur::ForwardArgs, fulgur::Options, fulgur::Run;
using fulgur::ConstTensor, fulgur::Expr, fulgur::Tensor, fulgur::TensorBinding,
    fulgur::TensorSymbol;
using fulgur::fail, fulgur::is_struct_size, fulgur::read_struct, fulgur::write_struct;
using fulgur::Group, fulgur::Sharding;
using fulgur::ScoresArgs, fulgur::ScoreStage, fulgur::Status;

static_assert(FULGUR_OK == static_cast<int>(Status::kOk) &&
              FULGUR_INVALID_ARGUMENT == static_cast<int>(Status::kInvalidArgument) &&
              FULGUR_UNSUPPORTED == static_cast<int>(Status::kUnsupported) &&
              FULGUR_UNAVAILABLE == static_cast<int>(Status::kUnavailable) &&
              FULGUR_OUT_OF_MEMORY == static_cast<int>(Status::kOutOfMemory) &&
              FULGUR_INTERNAL == static_cast<int>(Status::kInternal));
static_assert(FULGUR_SCORES_SCALED == static_cast<int>(ScoreStage::kScaled) &&
              FULGUR_SCORES_SOFTCAP == static_cast<int>(ScoreStage::kSoftcap) &&
              FULGUR_SCORES_MASKED == static_cast<int>(ScoreStage::kMasked) &&
              FULGUR_SCORES_PROBABILITIES == static_cast<int>(ScoreStage::kProbabilities));

static_assert(FULGUR_ROWS_CONTIGUOUS == static_cast<int>(Sharding::kContiguous) &&
              FULGUR_ROWS_ZIGZAG == static_cast<int>(Sharding::kZigzag) &&
              FULGUR_ROWS_BY_AREA == static_cast<int>(Sharding::kByArea) &&
              FULGUR_ROWS_BY_PAGE == static_cast<int>(Sharding::kByPage));

thread_local std::string last_error;

fulgur_status failed(fulgur_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();  // there was no memory for the message
  }
  return status;
}

template <class Call>
fulgur_status guarded(Call call) noexcept {
  try {
    call();
    return FULGUR_OK;
  } catch (const fulgur::Error& e) {
    return failed(static_cast<fulgur_status>(e.status()), e.what());
  } catch (const std::bad_alloc&) {
    return failed(FULGUR_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return failed(FULGUR_INTERNAL, e.what());
  } catch (...) {
    return failed(FULGUR_INTERNAL, "an exception of unknown type");
  }
}

// The sizes of the structs in version 0.1.0, the first: no caller has shorter ones.
constexpr size_t kMinOptions = offsetof(fulgur_options, engine) + sizeof(const char*);
constexpr size_t kMinRun = offsetof(fulgur_run, dropout_offset) + sizeof(uint64_t);
constexpr size_t kMinNeed = offsetof(fulgur_workspace_need, zeroed_bytes) + sizeof(int64_t);
template <class Struct>
constexpr size_t kMinTensors = sizeof(Struct);
template <>
constexpr size_t kMinTensors<fulgur_forward_args> = offsetof(fulgur_forward_args, bias);
template <>
constexpr size_t kMinTensors<fulgur_new_rows> = offsetof(fulgur_new_rows, k_cache_descale);
template <>
constexpr size_t kMinTensors<fulgur_descales> = offsetof(fulgur_descales, k_mean);
template <>
constexpr size_t kMinTensors<fulgur_quantize_args> = offsetof(fulgur_quantize_args, mean);
template <>
constexpr size_t kMinTensors<fulgur_backward_args> = offsetof(fulgur_backward_args, bias);
template <>
constexpr size_t kMinTensors<fulgur_scores_args> = offsetof(fulgur_scores_args, tensors);

template <class T>
T read_tensor(const DLTensor* given, const char* name, bool must) {
  if (given != nullptr) return T::from_dlpack(*given, name);
  if (must) fail(name, "got null, want a tensor");
  return T{};
}

// A C struct has the tensors of its table, and what is no tensor.
template <class Struct>
constexpr size_t kPointers = (sizeof(Struct) - sizeof(size_t)) / sizeof(void*);
static_assert(kPointers<fulgur_var_len> == fulgur::kVarLenTensors);
static_assert(kPointers<fulgur_kv_cache> == fulgur::kKvCacheTensors);
static_assert(kPointers<fulgur_shared_prefix> == fulgur::kSharedPrefixTensors);
static_assert(kPointers<fulgur_rotary> == fulgur::kRotaryTensors + 1);
static_assert(kPointers<fulgur_new_rows> == fulgur::kNewRowsTensors + 3);
static_assert(kPointers<fulgur_descales> == fulgur::kDescalesTensors + 2);
static_assert(kPointers<fulgur_forward_args> == fulgur::kForwardTensors + 7);
static_assert(kPointers<fulgur_backward_args> == fulgur::kBackwardTensors + 3);
static_assert(kPointers<fulgur_scores_args> == fulgur::kScoresTensors + 5);
static_assert(kPointers<fulgur_append_args> == fulgur::kAppendTensors + 2);

/// A struct of the caller, or one of zeros if the pointer is null.
template <class Struct>
Struct optional(const char* name, const Struct* given) {
  return given == nullptr ? Struct{} : read_struct(name, given, kMinTensors<Struct>);
}

/// Reads a row of the tables of tensors: the C structs have their names. `all`: the call appends
/// nothing, so that it must have what an appending call need not.
#define FULGUR_READ(member, arg, need, ...)            \
  to.member = read_tensor<decltype(to.member)>(        \
      from.member, #member,                            \
      fulgur::Need::need == fulgur::Need::kRequired || \
          (fulgur::Need::need == fulgur::Need::kUnlessAppend && all));

fulgur::VarLen convert(const fulgur_var_len* given) {
  const auto from = optional("lengths", given);
  constexpr bool all = true;
  fulgur::VarLen to;
  FULGUR_VAR_LEN_TENSORS(FULGUR_READ)
  return to;
}

fulgur::KvCache convert(const fulgur_kv_cache* given) {
  const auto from = optional("cache", given);
  constexpr bool all = true;
  fulgur::KvCache to;
  FULGUR_KV_CACHE_TENSORS(FULGUR_READ)
  return to;
}

fulgur::SharedPrefix convert(const fulgur_shared_prefix* given) {
  const auto from = optional("shared_prefix", given);
  constexpr bool all = true;
  fulgur::SharedPrefix to;
  FULGUR_SHARED_PREFIX_TENSORS(FULGUR_READ)
  return to;
}

fulgur::Descales convert(const fulgur_descales& from) {
  constexpr bool all = true;
  fulgur::Descales to;
  FULGUR_DESCALES_TENSORS(FULGUR_READ)
  return to;
}

/// Gives a tensor the dtype of a low-bit format, if one is named: C callers pass codes as bytes.
template <class T>
void read_format(const char* format, const char* name, T& t) {
  if (format != nullptr) t = t.as(fulgur::format_named(format), name);
}

std::vector<TensorBinding> convert(const fulgur_tensor_binding* given, size_t count) {
  constexpr size_t kMax = fulgur::expression::kMaxTensors;
  if (count > kMax) fail("tensor_count", "got {}, want at most {}", count, kMax);
  std::vector<TensorBinding> to;
  const auto* at = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = 0; i < count; ++i) {
    const auto name_of = [&](const char* field) { return fmt::format("tensors[{}]{}", i, field); };
    const auto* element = reinterpret_cast<const fulgur_tensor_binding*>(at);
    const auto from = read_struct(name_of("").c_str(), element, kMinTensors<fulgur_tensor_binding>);
    if (from.struct_size != given->struct_size) {
      fail(name_of("").c_str(), "struct_size is {}, want {} as that of tensors[0]",
           from.struct_size, given->struct_size);
    }
    if (from.name == nullptr) fail(name_of(".name").c_str(), "got null, want a name");
    to.push_back({from.name, read_tensor<ConstTensor>(from.tensor, from.name, true),
                  read_tensor<Tensor>(from.grad, from.name, false)});
    at += from.struct_size;
  }
  return to;
}

fulgur::Rotary convert(const fulgur_rotary* given) {
  const auto from = optional("rotary", given);
  constexpr bool all = true;
  fulgur::Rotary to;
  FULGUR_ROTARY_TENSORS(FULGUR_READ)
  to.interleaved = from.interleaved != 0;
  return to;
}

fulgur::NewRows convert(const fulgur_new_rows* given, const char* name) {
  const auto from = read_struct(name, given, kMinTensors<fulgur_new_rows>);
  constexpr bool all = true;
  fulgur::NewRows to;
  FULGUR_NEW_ROWS_TENSORS(FULGUR_READ)
  read_format(from.k_cache_format, "k_cache", to.k_cache);
  read_format(from.v_cache_format, "v_cache", to.v_cache);
  to.rotary = convert(from.rotary);
  return to;
}

AppendArgs convert(const fulgur_append_args* given) {
  const auto from = read_struct("args", given, kMinTensors<fulgur_append_args>);
  constexpr bool all = true;
  AppendArgs to;
  FULGUR_APPEND_TENSORS(FULGUR_READ)
  to.rows = convert(from.rows, "rows");
  to.cache = convert(from.cache);
  return to;
}

ForwardArgs convert(const fulgur_forward_args* given) {
  const auto from = read_struct("args", given, kMinTensors<fulgur_forward_args>);
  const bool all = from.append == nullptr;
  ForwardArgs to;
  FULGUR_FORWARD_TENSORS(FULGUR_READ)
  to.lengths = convert(from.lengths);
  to.cache = convert(from.cache);
  to.shared_prefix = convert(from.shared_prefix);
  const auto descales = optional("descales", from.descales);
  to.descales = convert(descales);
  read_format(descales.k_format, "k", to.k);
  read_format(descales.v_format, "v", to.v);
  if (from.append != nullptr) to.append = convert(from.append, "append");
  to.tensors = convert(from.tensors, from.tensor_count);
  return to;
}

BackwardArgs convert(const fulgur_backward_args* given) {
  const auto from = read_struct("args", given, kMinTensors<fulgur_backward_args>);
  constexpr bool all = true;
  BackwardArgs to;
  FULGUR_BACKWARD_TENSORS(FULGUR_READ)
  to.lengths = convert(from.lengths);
  to.tensors = convert(from.tensors, from.tensor_count);
  return to;
}

ScoresArgs convert(const fulgur_scores_args* given) {
  const auto from = read_struct("args", given, kMinTensors<fulgur_scores_args>);
  constexpr bool all = true;
  if (from.stage < FULGUR_SCORES_SCALED || from.stage > FULGUR_SCORES_PROBABILITIES) {
    fail("stage", "got {}, want a fulgur_score_stage", from.stage);
  }
  ScoresArgs to;
  FULGUR_SCORES_TENSORS(FULGUR_READ)
  to.lengths = convert(from.lengths);
  to.cache = convert(from.cache);
  to.tensors = convert(from.tensors, from.tensor_count);
  to.stage = static_cast<ScoreStage>(from.stage);
  return to;
}

#undef FULGUR_READ

/// The tensors of a call that quantizes, or of the inverse.
struct Quantization {
  fulgur_quantize_args from;
  Tensor x, codes, scale, zero_point, mean;

  explicit Quantization(const fulgur_quantize_args* given)
      : from(read_struct("args", given, kMinTensors<fulgur_quantize_args>)),
        x(read_tensor<Tensor>(from.x, "x", true)),
        codes(read_tensor<Tensor>(from.codes, "codes", true)),
        scale(read_tensor<Tensor>(from.scale, "scale", false)),
        zero_point(read_tensor<Tensor>(from.zero_point, "zero_point", false)),
        mean(read_tensor<Tensor>(from.mean, "mean", false)) {
    read_format(from.format, "codes", codes);
  }
};

fulgur_options defaults() {
  fulgur_options options{};
  options.struct_size = sizeof(fulgur_options);
  options.window_left = options.window_right = -1;
  return options;
}

/// A text of the options, in a call with these tensors.
Expr read_expression(const char* name, const char* text, std::span<const TensorBinding> tensors) {
  if (text == nullptr) return {};
  std::vector<TensorSymbol> symbols;
  for (const TensorBinding& b : tensors) {
    symbols.emplace_back(b.name, b.tensor.dtype, b.tensor.rank);
  }
  try {
    return fulgur::parse_expression(text, symbols);
  } catch (const fulgur::Error& error) {
    constexpr std::string_view kOf = "expression: ";
    const std::string_view words = error.what();
    fail(name, "{}", words.starts_with(kOf) ? words.substr(kOf.size()) : words);
  }
}

/// `tensors`: those that expressions index; without them a call has no expressions.
Options convert(const fulgur_options* given, const std::vector<TensorBinding>* tensors = nullptr) {
  const fulgur_options o =
      given == nullptr ? defaults() : read_struct("options", given, kMinOptions, defaults());
  Options options;
  if (tensors != nullptr) {
    options.score_mod = read_expression("score_mod", o.score_mod, *tensors);
    options.mask_mod = read_expression("mask_mod", o.mask_mod, *tensors);
  }
  options.mask = {o.window_left, o.window_right, o.chunk, o.top_left != 0};
  if (o.scale != nullptr) options.scale = *o.scale;
  options.softcap = o.softcap;
  options.dropout_p = o.dropout_p;
  options.max_seqlen_q = o.max_seqlen_q;
  options.max_seqlen_k = o.max_seqlen_k;
  options.deterministic = o.deterministic != 0;
  options.invariant = o.invariant != 0;
  options.threads = o.threads;
  if (o.engine != nullptr) options.engine = o.engine;
  if (o.algorithm != nullptr) options.algorithm = o.algorithm;
  options.max_workspace = o.max_workspace;
  options.fast_codes = o.fast_codes != 0;
  options.hadamard = o.hadamard != 0;
  return options;
}

Run convert(const fulgur_run* given) {
  if (given == nullptr) return {};
  const fulgur_run r = read_struct("run", given, kMinRun);
  return {r.stream, {r.workspace, r.workspace_bytes}, r.dropout_seed, r.dropout_offset};
}

Sharding sharding_of(int number) {
  if (number < FULGUR_ROWS_CONTIGUOUS || number > FULGUR_ROWS_BY_PAGE) {
    fail("sharding", "got {}, want a fulgur_sharding", number);
  }
  return static_cast<Sharding>(number);
}

fulgur::Distribution convert(const fulgur_distribution* given) {
  const auto from = read_struct("distribution", given, offsetof(fulgur_distribution, ring));
  return {sharding_of(from.sharding), from.head_ranks, from.ring != 0};
}

const Group& required(const fulgur_group* group) {
  if (group == nullptr) fail("group", "got null, want a group");
  return group->group;
}

/// Sets `*group` to the result of `make`.
template <class Make>
fulgur_status make_group(fulgur_group** group, const Make& make) {
  return guarded([&] {
    if (group == nullptr) fail("group", "got null, want where to put the group");
    *group = nullptr;
    *group = new fulgur_group{make()};
  });
}

double deadline_of(double seconds) { return seconds == 0 ? Group::kDeadline : seconds; }

/// The caller's function as an Exchange.
fulgur::Exchange exchange_by(fulgur_exchange exchange, void* context) {
  if (exchange == nullptr) return {};
  return [=](std::span<const std::span<const std::byte>> sends,
             std::span<const std::span<std::byte>> receives) {
    std::vector<const void*> from;
    std::vector<void*> to;
    std::vector<size_t> from_bytes, to_bytes;
    for (const auto& bytes : sends) {
      from.push_back(bytes.data());
      from_bytes.push_back(bytes.size());
    }
    for (const auto& bytes : receives) {
      to.push_back(bytes.data());
      to_bytes.push_back(bytes.size());
    }
    const int result =
        exchange(context, from.data(), from_bytes.data(), to.data(), to_bytes.data());
    if (result == 0) return;
    throw fulgur::Error(Status::kUnavailable, fmt::format("exchange returned {}", result));
  };
}

void give_text(const std::string& from, char* text, size_t size, size_t* length) {
  if (length != nullptr) *length = from.size();
  if (text == nullptr || size == 0) return;
  const size_t count = std::min(from.size(), size - 1);
  std::memcpy(text, from.data(), count);
  text[count] = 0;
}

/// The plan that a handle stands for.
const fulgur::Plan& required(const fulgur_plan* plan) {
  if (plan == nullptr) fail("plan", "got null, want a plan");
  return plan->plan;
}

/// Makes a handle of the plan that `planned(args, options)` returns.
template <class Args, class Planned>
fulgur_status make_plan(const Args* args, const fulgur_options* options, fulgur_plan** plan,
                        const Planned& planned) {
  return guarded([&] {
    if (plan == nullptr) fail("plan", "got null, want where to put it");
    *plan = nullptr;
    const auto call = convert(args);
    *plan = new fulgur_plan{planned(call, convert(options, &call.tensors))};
  });
}

template <class Args>
fulgur_status make_plan(const Args* args, const fulgur_options* options, fulgur_plan** plan) {
  return make_plan(args, options, plan,
                   [](const auto& call, const Options& o) { return fulgur::plan(call, o); });
}

template <class Args>
fulgur_status make_plan(const char* card, const Args* args, const fulgur_options* options,
                        fulgur_plan** plan) {
  return make_plan(args, options, plan, [&](const auto& call, const Options& o) {
    if (card == nullptr) fail("card", "got null, want a name, such as \"a100\"");
    return fulgur::cuda::plan_for_card(card, call, o);
  });
}

template <class Args>
fulgur_status prewarm(const Args* args, const fulgur_options* options, const char* folder,
                      int* compiled, int* present) {
  return guarded([&] {
    const auto call = convert(args);
    const fulgur::cuda::Prewarmed done = fulgur::cuda::prewarm(
        call, convert(options, &call.tensors), folder == nullptr ? "" : folder);
    if (compiled != nullptr) *compiled = done.compiled;
    if (present != nullptr) *present = done.present;
  });
}

template <class Args>
fulgur_status tune(const Args* args, const fulgur_options* options, const fulgur_run* run,
                   char* text, size_t size, size_t* length) {
  return guarded([&] {
    std::string lines;
    const auto call = convert(args);
    for (const fulgur::cuda::TileTime& tile :
         fulgur::cuda::tune(call, convert(options, &call.tensors), convert(run)).tiles) {
      lines += fmt::format("{} {} {} {}\n", tile.family, tile.Br, tile.Bc, tile.microseconds);
    }
    give_text(lines, text, size, length);
  });
}

}  // namespace

fulgur_status fulgur_options_init(fulgur_options* options, size_t struct_size) {
  return guarded([&] {
    if (options == nullptr) fail("options", "got null, want a struct");
    if (!is_struct_size<fulgur_options>(struct_size, kMinOptions)) {
      fail("struct_size", "got {}, want sizeof(fulgur_options), at least {} and a multiple of {}",
           struct_size, kMinOptions, alignof(fulgur_options));
    }
    write_struct(options, struct_size, defaults());
  });
}

fulgur_status fulgur_forward(const fulgur_forward_args* args, const fulgur_options* options,
                             const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::forward(call, convert(options, &call.tensors), convert(run));
  });
}

fulgur_status fulgur_backward(const fulgur_backward_args* args, const fulgur_options* options,
                              const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::backward(call, convert(options, &call.tensors), convert(run));
  });
}

fulgur_status fulgur_plan_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                  fulgur_plan** plan) {
  return make_plan(args, options, plan);
}

fulgur_status fulgur_plan_backward(const fulgur_backward_args* args, const fulgur_options* options,
                                   fulgur_plan** plan) {
  return make_plan(args, options, plan);
}

fulgur_status fulgur_plan_forward_for_card(const char* card, const fulgur_forward_args* args,
                                           const fulgur_options* options, fulgur_plan** plan) {
  return make_plan(card, args, options, plan);
}

fulgur_status fulgur_plan_backward_for_card(const char* card, const fulgur_backward_args* args,
                                            const fulgur_options* options, fulgur_plan** plan) {
  return make_plan(card, args, options, plan);
}

void fulgur_plan_free(fulgur_plan* plan) { delete plan; }

fulgur_status fulgur_plan_run_forward(const fulgur_plan* plan, const fulgur_forward_args* args,
                                      const fulgur_run* run) {
  return guarded([&] { required(plan).run(convert(args), convert(run)); });
}

fulgur_status fulgur_plan_run_backward(const fulgur_plan* plan, const fulgur_backward_args* args,
                                       const fulgur_run* run) {
  return guarded([&] { required(plan).run(convert(args), convert(run)); });
}

fulgur_status fulgur_plan_workspace(const fulgur_plan* plan, fulgur_workspace_need* need) {
  return guarded([&] {
    if (need == nullptr) fail("need", "got null, want a struct");
    const size_t size = need->struct_size;
    if (!is_struct_size<fulgur_workspace_need>(size, kMinNeed)) {
      fail(
          "need",
          "struct_size is {}, want sizeof(fulgur_workspace_need), at least {} and a multiple of {}",
          size, kMinNeed, alignof(fulgur_workspace_need));
    }
    const fulgur::WorkspaceNeed n = required(plan).workspace();
    write_struct(need, size, {size, n.bytes, n.alignment, n.zeroed_bytes});
  });
}

fulgur_status fulgur_plan_explain(const fulgur_plan* plan, char* text, size_t size,
                                  size_t* length) {
  return guarded([&] { give_text(required(plan).explain(), text, size, length); });
}

fulgur_status fulgur_plan_details(const fulgur_plan* plan, char* text, size_t size,
                                  size_t* length) {
  return guarded([&] { give_text(required(plan).details().json(), text, size, length); });
}

fulgur_status fulgur_engines(char* text, size_t size, size_t* length) {
  return guarded([&] {
    std::string lines;
    for (const fulgur::EngineInfo& engine : fulgur::engines()) {
      lines += fmt::format("{}\t{}", engine.name, engine.description);
      if (!engine.unavailable.empty()) lines += "\t" + engine.unavailable;
      lines += "\n";
    }
    give_text(lines, text, size, length);
  });
}

fulgur_status fulgur_cuda_allocate(int64_t bytes, int device, void** data) {
  return guarded([&] {
    if (data == nullptr) fail("data", "got null, want where to put it");
    *data = nullptr;
    *data = fulgur::cuda::allocate(bytes, device);
  });
}

fulgur_status fulgur_cuda_free(void* data, int device) {
  return guarded([&] { fulgur::cuda::deallocate(data, device); });
}

fulgur_status fulgur_cuda_copy(void* to, const void* from, int64_t bytes, int device) {
  return guarded([&] { fulgur::cuda::copy(to, from, bytes, device); });
}

fulgur_status fulgur_cuda_synchronize(int device) {
  return guarded([&] { fulgur::cuda::synchronize(device); });
}

fulgur_status fulgur_prewarm_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                     const char* folder, int* compiled, int* present) {
  return prewarm(args, options, folder, compiled, present);
}
fulgur_status fulgur_prewarm_backward(const fulgur_backward_args* args,
                                      const fulgur_options* options, const char* folder,
                                      int* compiled, int* present) {
  return prewarm(args, options, folder, compiled, present);
}

fulgur_status fulgur_tune_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                  const fulgur_run* run, char* text, size_t size, size_t* length) {
  return tune(args, options, run, text, size, length);
}
fulgur_status fulgur_tune_backward(const fulgur_backward_args* args, const fulgur_options* options,
                                   const fulgur_run* run, char* text, size_t size, size_t* length) {
  return tune(args, options, run, text, size, length);
}

fulgur_status fulgur_merge(const DLTensor* const* part_outs, const DLTensor* const* part_lses,
                           size_t count, const DLTensor* out, const DLTensor* lse,
                           const fulgur_run* run) {
  return guarded([&] {
    if (count > 0 && (part_outs == nullptr || part_lses == nullptr))
      fail("parts", "got null, want {} tensors", count);
    std::vector<fulgur::Partial> parts;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back(
          {read_tensor<ConstTensor>(part_outs[i], fmt::format("parts[{}].out", i).c_str(), true),
           read_tensor<ConstTensor>(part_lses[i], fmt::format("parts[{}].lse", i).c_str(), true)});
    }
    fulgur::merge(parts,
                  {read_tensor<Tensor>(out, "out", true), read_tensor<Tensor>(lse, "lse", false)},
                  convert(run));
  });
}

fulgur_status fulgur_append(const fulgur_append_args* args, const fulgur_options* options,
                            const fulgur_run* run) {
  return guarded([&] { fulgur::append(convert(args), convert(options), convert(run)); });
}

fulgur_status fulgur_scores(const fulgur_scores_args* args, const fulgur_options* options,
                            const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::scores(call, convert(options, &call.tensors), convert(run));
  });
}

fulgur_status fulgur_expand_blocks(const DLTensor* offsets, const DLTensor* indices,
                                   const DLTensor* blocks) {
  return guarded([&] {
    fulgur::expand_blocks({read_tensor<ConstTensor>(offsets, "offsets", true),
                           read_tensor<ConstTensor>(indices, "indices", true)},
                          read_tensor<Tensor>(blocks, "blocks", true));
  });
}

fulgur_status fulgur_quantize(const fulgur_quantize_args* args, const fulgur_options* options) {
  return guarded([&] {
    const Quantization q(args);
    fulgur::quantize({q.x, q.codes, q.scale, q.zero_point, q.from.static_scale != 0, q.mean,
                      q.from.static_mean != 0},
                     convert(options), {.stream = q.from.stream});
  });
}

fulgur_status fulgur_dequantize(const fulgur_quantize_args* args, const fulgur_options* options) {
  return guarded([&] {
    const Quantization q(args);
    fulgur::dequantize({q.codes, q.scale, q.zero_point, q.x, q.mean}, convert(options),
                       {.stream = q.from.stream});
  });
}

fulgur_status fulgur_hadamard(const DLTensor* x, const DLTensor* y, int inverse,
                              const fulgur_options* options, const fulgur_run* run) {
  return guarded([&] {
    fulgur::hadamard(
        {read_tensor<ConstTensor>(x, "x", true), read_tensor<Tensor>(y, "y", true), inverse != 0},
        convert(options), convert(run));
  });
}

fulgur_status fulgur_rows_of(int sharding, int64_t length, int ranks, int rank,
                             const fulgur_options* options, int64_t* rows, size_t size,
                             size_t* count) {
  return guarded([&] {
    const fulgur::Mask mask = options == nullptr ? fulgur::causal() : convert(options).mask;
    const std::vector<int64_t> all =
        fulgur::rows_of(sharding_of(sharding), length, ranks, rank, mask);
    if (count != nullptr) *count = all.size();
    if (rows != nullptr) std::copy_n(all.begin(), std::min(size, all.size()), rows);
  });
}

fulgur_status fulgur_group_from_env(double deadline, fulgur_group** group) {
  return make_group(group, [&] { return Group::from_env(deadline_of(deadline)); });
}

fulgur_status fulgur_group_connect(int rank, int ranks, const char* host, int port, double deadline,
                                   fulgur_group** group) {
  return make_group(group, [&] {
    if (host == nullptr) fail("host", "got null, want where rank 0 listens");
    return Group::connect(rank, ranks, host, port, deadline_of(deadline));
  });
}

fulgur_status fulgur_group_from_nccl(void* comm, double deadline, fulgur_group** group) {
  return make_group(group, [&] { return Group::from_nccl(comm, deadline_of(deadline)); });
}

fulgur_status fulgur_group_from_exchange(int rank, int ranks, fulgur_exchange exchange,
                                         void* context, fulgur_group** group) {
  return make_group(
      group, [&] { return Group::from_exchange(rank, ranks, exchange_by(exchange, context)); });
}

fulgur_status fulgur_group_place(const fulgur_group* group, int* rank, int* ranks) {
  return guarded([&] {
    const Group& its = required(group);
    if (rank != nullptr) *rank = its.rank();
    if (ranks != nullptr) *ranks = its.size();
  });
}

void fulgur_group_free(fulgur_group* group) { delete group; }

fulgur_status fulgur_group_forward(const fulgur_forward_args* args, const fulgur_options* options,
                                   const fulgur_group* group,
                                   const fulgur_distribution* distribution, const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::forward(call, convert(options, &call.tensors), required(group), convert(distribution),
                    convert(run));
  });
}

fulgur_status fulgur_group_backward(const fulgur_backward_args* args, const fulgur_options* options,
                                    const fulgur_group* group,
                                    const fulgur_distribution* distribution,
                                    const fulgur_run* run) {
  return guarded([&] {
    const auto call = convert(args);
    fulgur::backward(call, convert(options, &call.tensors), required(group), convert(distribution),
                     convert(run));
  });
}

const char* fulgur_last_error(void) { return last_error.c_str(); }
const char* fulgur_version(void) { return FULGUR_VERSION; }
