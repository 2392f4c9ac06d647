#include "api/c_arguments.h"

#include <fmt/format.h>

#include <span>
#include <string_view>

#include "call/tensors.h"
#include "expression/graph.h"
#include "fulgur/error.h"

namespace fulgur::c_api {
namespace {

static_assert(FULGUR_SCORES_SCALED == static_cast<int>(ScoreStage::kScaled) &&
              FULGUR_SCORES_SOFTCAP == static_cast<int>(ScoreStage::kSoftcap) &&
              FULGUR_SCORES_MASKED == static_cast<int>(ScoreStage::kMasked) &&
              FULGUR_SCORES_PROBABILITIES == static_cast<int>(ScoreStage::kProbabilities));

static_assert(FULGUR_ROWS_CONTIGUOUS == static_cast<int>(Sharding::kContiguous) &&
              FULGUR_ROWS_ZIGZAG == static_cast<int>(Sharding::kZigzag) &&
              FULGUR_ROWS_BY_AREA == static_cast<int>(Sharding::kByArea) &&
              FULGUR_ROWS_BY_PAGE == static_cast<int>(Sharding::kByPage));

// The sizes of the structs in version 0.1.0, the first: no caller has shorter ones.
constexpr size_t kMinRun = offsetof(fulgur_run, dropout_offset) + sizeof(uint64_t);
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

// A C struct has the tensors of its table, and what is no tensor.
template <class Struct>
constexpr size_t kPointers = (sizeof(Struct) - sizeof(size_t)) / sizeof(void*);
static_assert(kPointers<fulgur_var_len> == kVarLenTensors);
static_assert(kPointers<fulgur_kv_cache> == kKvCacheTensors);
static_assert(kPointers<fulgur_shared_prefix> == kSharedPrefixTensors);
static_assert(kPointers<fulgur_rotary> == kRotaryTensors + 1);
static_assert(kPointers<fulgur_new_rows> == kNewRowsTensors + 3);
static_assert(kPointers<fulgur_descales> == kDescalesTensors + 2);
static_assert(kPointers<fulgur_forward_args> == kForwardTensors + 7);
static_assert(kPointers<fulgur_backward_args> == kBackwardTensors + 3);
static_assert(kPointers<fulgur_scores_args> == kScoresTensors + 5);
static_assert(kPointers<fulgur_append_args> == kAppendTensors + 2);

/// A struct of the caller, or one of zeros if the pointer is null.
template <class Struct>
Struct optional(const char* name, const Struct* given) {
  return given == nullptr ? Struct{} : read_struct(name, given, kMinTensors<Struct>);
}

/// Reads a row of the tables of tensors: the C structs have their names. `all`: the call appends
/// nothing, so that it must have what an appending call need not.
#define FULGUR_READ(member, arg, need, ...)     \
  to.member = read_tensor<decltype(to.member)>( \
      from.member, #member,                     \
      Need::need == Need::kRequired || (Need::need == Need::kUnlessAppend && all));

VarLen convert(const fulgur_var_len* given) {
  const auto from = optional("lengths", given);
  constexpr bool all = true;
  VarLen to;
  FULGUR_VAR_LEN_TENSORS(FULGUR_READ)
  return to;
}

KvCache convert(const fulgur_kv_cache* given) {
  const auto from = optional("cache", given);
  constexpr bool all = true;
  KvCache to;
  FULGUR_KV_CACHE_TENSORS(FULGUR_READ)
  return to;
}

SharedPrefix convert(const fulgur_shared_prefix* given) {
  const auto from = optional("shared_prefix", given);
  constexpr bool all = true;
  SharedPrefix to;
  FULGUR_SHARED_PREFIX_TENSORS(FULGUR_READ)
  return to;
}

Descales convert(const fulgur_descales& from) {
  constexpr bool all = true;
  Descales to;
  FULGUR_DESCALES_TENSORS(FULGUR_READ)
  return to;
}

/// Gives a tensor the dtype of a low-bit format, if one is named: C callers pass codes as bytes.
template <class T>
void read_format(const char* format, const char* name, T& t) {
  if (format != nullptr) t = t.as(format_named(format), name);
}

std::vector<TensorBinding> convert(const fulgur_tensor_binding* given, size_t count) {
  constexpr size_t kMax = expression::kMaxTensors;
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

Rotary convert(const fulgur_rotary* given) {
  const auto from = optional("rotary", given);
  constexpr bool all = true;
  Rotary to;
  FULGUR_ROTARY_TENSORS(FULGUR_READ)
  to.interleaved = from.interleaved != 0;
  return to;
}

NewRows convert(const fulgur_new_rows* given, const char* name) {
  const auto from = read_struct(name, given, kMinTensors<fulgur_new_rows>);
  constexpr bool all = true;
  NewRows to;
  FULGUR_NEW_ROWS_TENSORS(FULGUR_READ)
  read_format(from.k_cache_format, "k_cache", to.k_cache);
  read_format(from.v_cache_format, "v_cache", to.v_cache);
  to.rotary = convert(from.rotary);
  return to;
}

/// A text of the options, in a call with these tensors.
Expr read_expression(const char* name, const char* text, std::span<const TensorBinding> tensors) {
  if (text == nullptr) return {};
  std::vector<TensorSymbol> symbols;
  for (const TensorBinding& b : tensors) {
    symbols.emplace_back(b.name, b.tensor.dtype, b.tensor.rank);
  }
  try {
    return parse_expression(text, symbols);
  } catch (const Error& error) {
    constexpr std::string_view kOf = "expression: ";
    const std::string_view words = error.what();
    fail(name, "{}", words.starts_with(kOf) ? words.substr(kOf.size()) : words);
  }
}

}  // namespace

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

Quantization::Quantization(const fulgur_quantize_args* given)
    : from(read_struct("args", given, kMinTensors<fulgur_quantize_args>)),
      x(read_tensor<Tensor>(from.x, "x", true)),
      codes(read_tensor<Tensor>(from.codes, "codes", true)),
      scale(read_tensor<Tensor>(from.scale, "scale", false)),
      zero_point(read_tensor<Tensor>(from.zero_point, "zero_point", false)),
      mean(read_tensor<Tensor>(from.mean, "mean", false)) {
  read_format(from.format, "codes", codes);
}

fulgur_options default_options() {
  fulgur_options options{};
  options.struct_size = sizeof(fulgur_options);
  options.window_left = options.window_right = -1;
  return options;
}

Options convert(const fulgur_options* given, const std::vector<TensorBinding>* tensors) {
  const fulgur_options o = given == nullptr
                               ? default_options()
                               : read_struct("options", given, kMinOptions, default_options());
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

Distribution convert(const fulgur_distribution* given) {
  const auto from = read_struct("distribution", given, offsetof(fulgur_distribution, ring));
  return {sharding_of(from.sharding), from.head_ranks, from.ring != 0};
}

}  // namespace fulgur::c_api
