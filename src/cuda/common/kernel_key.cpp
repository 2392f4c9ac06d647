#include "cuda/common/kernel_key.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numbers>
#include <tuple>

#include "base/convert.h"
#include "base/formats.h"
#include "call/lengths.h"
#include "call/mask.h"
#include "cuda/common/expression.h"
#include "kernels/host_device/dropout.h"
#include "kernels/host_device/element.h"
#include "kernels/host_device/score.h"

namespace fulgur::cuda {
namespace {

static_assert(static_cast<int>(DType::kF16) == kernels::kF16);
static_assert(static_cast<int>(DType::kBF16) == kernels::kBF16);
static_assert(static_cast<int>(DType::kF32) == kernels::kF32);
static_assert(static_cast<int>(DType::kBool) == kernels::kBool);
/// Whether the kernels' constants of a format are those of the table of formats.
template <DType dtype>
constexpr bool is_known(kernels::Element element) {
  return static_cast<int>(dtype) == element && kernels::bits_of(element) == Format<dtype>::kBits;
}
static_assert(is_known<DType::kE4M3>(kernels::kE4M3));
static_assert(is_known<DType::kE5M2>(kernels::kE5M2));
static_assert(is_known<DType::kInt8>(kernels::kInt8));
static_assert(is_known<DType::kInt4>(kernels::kInt4));

constexpr int kMinStep = 16;                 // of columns that kernels take together
constexpr double kMinBiasedScale = 0x1p-12;  // kHidingBias divided by it is finite in f32
constexpr int64_t kMaxBound =
    (int64_t{1} << 30) - 1024;  // bounds beyond it never bind, and fit ints with diagonals

/// Whether the mask's bounds may be for longer sequences than those of this problem.
bool of_any_length(const Problem& p) { return p.invariant || p.origin != Origin{}; }

/// 1 / scale.
float bias_factor(const Problem& p) { return static_cast<float>(1 / p.scale); }

}  // namespace

kernels::Element element_of(DType dtype) { return static_cast<kernels::Element>(dtype); }

bool left_binds(const Problem& p) {
  // The maximum of keys before the diagonal of a row.
  const int64_t keys = (p.mask.top_left ? p.sq : p.sk) - 1;
  return chunk_binds(p) || (p.mask.left >= 0 && (of_any_length(p) || p.mask.left < keys));
}

bool right_binds(const Problem& p) {
  const int64_t keys = (p.mask.top_left ? p.sk : p.sq) - 1;
  return chunk_binds(p) || (p.mask.right >= 0 && (of_any_length(p) || p.mask.right < keys));
}

bool chunk_binds(const Problem& p) {
  // A single chunk of all keys hides them from rows before the first key, as causal does, or from
  // rows after the last key.
  const bool rows_outside = p.mask.top_left ? p.sq > p.mask.chunk : p.sq > 1 && p.mask.right != 0;
  return p.mask.chunk > 0 && (of_any_length(p) || p.mask.chunk < p.sk || rows_outside);
}

bool top_left_binds(const Problem& p) {
  const bool same = !p.packed && !p.has(Arg::kSeqUsedQ) && !p.has(Arg::kSeqUsedK) && p.sq == p.sk;
  const bool has_diagonal = left_binds(p) || right_binds(p) || p.has(Arg::kAlibiSlopes);
  return p.mask.top_left && has_diagonal && (of_any_length(p) || !same);
}

Problem long_sequences(const Problem& p, int64_t batch) {
  Problem other = p;
  other.packed = false;
  other.batch = batch;
  other.sq = other.sk = 8192;
  other.origin = {};
  return other;
}

bool has_cache(const Problem& p) {
  return p.cache.paged() || p.has(Arg::kCacheBatchIdx) || p.has(Arg::kLeftpadK) ||
         p.packed != p.packed_k;
}

OperandTypes multiplied(const Problem& p) {
  OperandTypes types = p.dtypes;
  if (is_low_bit(types.k) && !is_low_bit(types.q)) types.q = types.k = DType::kF16;
  // The probability of a segment of keys is summed over all of its scores, which a map of tiles
  // would not compute; a bias needs the shared memory of K.
  const bool fast = p.fast_codes && is_low_bit(types.q) && p.dropout_p == 0 && !p.has(Arg::kBias) &&
                    !p.expressions.masks();
  if (is_low_bit(types.v) && !(fast && types.v == DType::kE4M3)) types.v = DType::kF16;
  return types;
}

KernelKey kernel_key(const Problem& p) {
  const OperandTypes types = multiplied(p);
  const auto rounded = [](int64_t dim, DType dtype) {
    const int step = std::max(kernels::k_step(element_of(dtype)), kMinStep);
    return ceil_div(dim, step) * step;
  };
  const DeviceExpressions expressions(p);
  return {.dtypes = types,
          .head_dim = rounded(p.d, types.k),
          .value_dim = rounded(p.dv, types.v),
          .has_left = left_binds(p),
          .has_right = right_binds(p),
          .has_chunk = chunk_binds(p),
          .top_left = top_left_binds(p),
          .part = p.origin != Origin{},
          .tree = p.has(Arg::kTreeMask),
          .transforms_scores = transforms(p),
          .softcap = p.softcap > 0,
          .alibi = p.has(Arg::kAlibiSlopes),
          .bias = p.has(Arg::kBias) ? 1 + element_of(p.bias.dtype) : 0,
          .bias_rows = p.bias.row != 0,
          .score_mod = expressions.changes_scores(),
          .mask_mod = expressions.masks(),
          .score_mod_slope = expressions.has_slope(),
          .expressions = expressions.text(),
          .mask_hulls = expressions.mask_hulls().text,
          .packed = p.packed,
          .seqused_q = p.has(Arg::kSeqUsedQ),
          .seqused_k = p.has(Arg::kSeqUsedK)};
}

kernels::Operands operands_of(const KernelKey& key) {
  const OperandTypes& types = key.dtypes;
  return {element_of(types.q), element_of(types.k), element_of(types.v), element_of(types.out)};
}

bool exceeds_16_bits(const OperandTypes& dtypes) {
  return dtypes.q == DType::kF32 || dtypes.q == DType::kF64;
}

std::string dtypes_rejected(const OperandTypes& dtypes, bool takes_f32) {
  if (takes_f32 && dtypes.q == DType::kF32) {
    return dtypes == OperandTypes::all(DType::kF32) ? "" : "multiplies f32 with f32 alone";
  }
  if (!dtypes.in({DType::kBF16, DType::kF16}))
    return takes_f32 ? "computes bf16, f16 and f32" : "computes bf16 and f16";
  // The tensor cores multiply operands of one type: q with k, and gradients of out with v.
  if (dtypes.q != dtypes.k || dtypes.v != dtypes.out) return "multiplies operands of one dtype";
  return {};
}

bool has_wide_heads(const Problem& p) { return p.d > kMaxDim || p.dv > kMaxDim; }

std::string dims_rejected(const Problem& p, const HeadDims& max) {
  if (p.d <= max.d && p.dv <= max.dv) return {};
  const std::string up_to = max.d == max.dv
                                ? fmt::format("d and dv up to {}", max.d)
                                : fmt::format("d up to {} and dv up to {}", max.d, max.dv);
  return fmt::format("computes {}, got {} and {}", up_to, p.d, p.dv);
}

std::string sizes_rejected(const Problem& p, const HeadDims& max) {
  if (std::string why = dims_rejected(p, max); !why.empty()) return why;
  if (std::max(p.sq, p.sk) >= kMaxRows) {
    return fmt::format("computes sequences of less than 2^29 rows, got {} of q and {} of k", p.sq,
                       p.sk);
  }
  return {};
}

std::string codes_rejected(const Problem& p) {
  const OperandTypes& types = p.dtypes;
  const std::array operands = {std::pair{"q", types.q}, std::pair{"k", types.k},
                               std::pair{"v", types.v}};
  if (std::ranges::none_of(operands, [](const auto& x) { return is_low_bit(x.second); })) {
    return types == OperandTypes::all(types.q) ? "" : "takes q, k, v and out of one dtype";
  }
  for (const auto& [name, dtype] : operands) {
    if (is_low_bit(dtype) && dtype > DType::kQ4_0) {
      return fmt::format("takes no low-bit {} ({}) but e4m3, e5m2, int8, int4, q8_0 and q4_0", name,
                         name_of(dtype));
    }
    if (is_low_bit(types.q) && !is_low_bit(dtype)) {
      return fmt::format("takes a q of {} with k and v of codes, got {} of {}", name_of(types.q),
                         name, name_of(dtype));
    }
  }
  for (const auto& [name, dtype, scales, dim] : {std::tuple{"k", types.k, &p.k_descale, p.d},
                                                 std::tuple{"v", types.v, &p.v_descale, p.dv}}) {
    if (!is_low_bit(dtype)) {
      if (dtype == types.q) continue;
      return fmt::format("computes k and v of codes or of the dtype of q, got {} of {}", name,
                         name_of(dtype));
    }
    const int chunk = kernels::chunk_columns(element_of(dtype));
    if (scales->groups > 1 && dim / scales->groups % chunk != 0) {
      return fmt::format("computes groups of multiples of {} columns of {}, got {} of {}", chunk,
                         name_of(dtype), dim / scales->groups, name);
    }
  }
  if (is_low_bit(types.q) && types.out == DType::kF32) {
    return fmt::format("writes bf16 and f16 for {}, got an out of f32", name_of(types.q));
  }
  return {};
}

std::string products_of_codes_rejected(const Problem& p) {
  if (p.dtypes.q != DType::kE4M3) {
    return fmt::format("multiplies codes of a q of e4m3, got {}", name_of(p.dtypes.q));
  }
  for (const auto& [name, dtype] : {std::pair{"k", p.dtypes.k}, std::pair{"v", p.dtypes.v}}) {
    if (dtype == DType::kE4M3 || dtype == DType::kE5M2) continue;
    return fmt::format("multiplies codes of e4m3 and e5m2, got {} of {}", name, name_of(dtype));
  }
  for (const auto& [name, scales] :
       {std::pair{"q_descale", p.q_descale}, std::pair{"k_descale", p.k_descale},
        std::pair{"v_descale", p.v_descale}}) {
    if (!scales.of_rows) continue;
    return fmt::format("takes a {} of the tensor or of sequences and kv heads, not one of rows",
                       name);
  }
  return {};
}

AnyForwardKey any_forward_key(const Problem& p) {
  AnyForwardKey key;
  static_cast<KernelKey&>(key) = kernel_key(p);
  key.has_sinks = p.has(Arg::kSinks);
  key.packed_k = p.packed_k;
  key.has_lse = p.has(Arg::kLse);
  key.page = static_cast<int>(p.cache.page);
  key.page_lists = p.cache.pages == Problem::Cache::Pages::kLists;
  key.batch_idx = p.has(Arg::kCacheBatchIdx);
  key.leftpad = p.has(Arg::kLeftpadK);
  return key;
}

kernels::Band band_of(const KernelKey& key, const Mask& mask) {
  const auto bound = [](bool has, int64_t keys) {
    return has ? static_cast<int>(std::min(keys, kMaxBound)) : 0;
  };
  const Mask around = window_around(mask);
  return {key.has_left,
          key.has_right,
          bound(key.has_left, around.left),
          bound(key.has_right, around.right),
          bound(key.has_chunk, mask.chunk),
          key.top_left};
}

kernels::Band band_of(const KernelKey& key, const Problem& p) {
  kernels::Band band = band_of(key, p.mask);
  band.shift = static_cast<int>(whole_sequence(p).shift);
  band.first_key = static_cast<int>(p.origin.key);
  return band;
}

std::string origin_rejected(const Problem& p) {
  const Origin& o = p.origin;
  if (std::max(o.queries, o.keys) < kMaxRows && (o.batch + p.batch) * o.heads < kMaxRows) return {};
  return fmt::format(
      "computes parts of less than {} rows and heads of all sequences, got {} and {}", kMaxRows,
      std::max(o.queries, o.keys), (o.batch + p.batch) * o.heads);
}

float scale_log2(const Problem& p) { return static_cast<float>(p.scale * std::numbers::log2e); }

bool transforms(const Problem& p) {
  const bool biased = p.has(Arg::kBias);
  return !(scale_log2(p) >= std::numeric_limits<float>::min()) || p.softcap > 0 ||
         p.has(Arg::kAlibiSlopes) || p.expressions.changes_scores() ||
         (biased && (p.scale < kMinBiasedScale || p.dtypes.q == DType::kE4M3));
}

int bias_terms(const Problem& p) {
  if (!p.has(Arg::kBias) || p.bias.dtype != DType::kBF16) return 0;
  // Packed sequences do not take them: `invariant` calls have the same bits in any layout.
  if (!p.alike() || p.invariant || p.expressions.given() || transforms(p)) return 0;
  // The least bf16 times the first term has to be -inf, and times the second one finite.
  const float factor = bias_factor(p);
  const bool exact = f32_from_bf16(bf16_from_f32(factor)) == factor;
  if (factor < 2 || (!exact && factor >= 128)) return 0;
  return exact ? 1 : 2;
}

CallParams call_params(const Problem& p, const kernels::Band& band) {
  constexpr double kLog2e = std::numbers::log2e;
  CallParams params{};
  const bool moved = p.on_host.has(Arg::kAlibiSlopes) && p.slopes_of_batch;
  params.alibi_batch_stride = moved ? p.hq : p.slopes_batch;  // the upload makes them contiguous
  params.total_q = static_cast<int>(p.total_q);
  params.total_k = static_cast<int>(p.total_k);
  params.sq = static_cast<int>(p.sq);
  params.sk = static_cast<int>(p.sk);
  params.d = static_cast<int>(p.d);
  params.dv = static_cast<int>(p.dv);
  params.hq = static_cast<int>(p.hq);
  params.group = static_cast<int>(p.group());
  params.window_left = band.left;
  params.window_right = band.right;
  params.chunk = band.chunk;
  const Origin& o = p.origin;
  params.part = {band.shift, static_cast<int>(o.heads),
                 static_cast<int>(o.batch * o.heads + o.head), static_cast<int>(o.query),
                 static_cast<int>(o.key)};
  params.scale_log2 = scale_log2(p);
  params.bias = {nullptr, p.bias.batch, p.bias.head, p.bias.row, p.bias.key};
  if (p.has(Arg::kBias)) params.bias_factor = bias_factor(p);
  params.dropout_threshold = kernels::dropout_threshold(p.dropout_p);
  params.keep_scale = static_cast<float>(1 / (1 - p.dropout_p));
  if (p.softcap > 0) {
    // If the quotient underflows or overflows, tanh is the identity or a step.
    constexpr double kMax = std::numeric_limits<float>::max();
    const double scale = 2 * kLog2e * p.scale / p.softcap;
    params.softcap_scale = static_cast<float>(std::clamp(scale, -kMax, kMax));
    params.softcap_small = static_cast<float>(p.scale * kLog2e * kernels::kTanhSquare);
    params.softcap_log2 = static_cast<float>(std::min(p.softcap * kLog2e, kMax / 2));
  }
  return params;
}

Sinks sinks_of(const ConstTensor& sinks) {
  return {sinks.data, static_cast<kernels::Element>(sinks.dtype)};
}

Descale descale_of(const Scales& at) { return {nullptr, element_of(at.dtype), at.batch, at.head}; }

KeyPages key_pages(const Problem& p) {
  return {static_cast<int>(p.cache.entries),
          static_cast<int>(p.cache.ids),
          p.cache.table_stride,
          p.cache.id_stride,
          nullptr,
          nullptr};
}

void describe_tile(const TileId& tile, const KernelKey& key, Details& details) {
  details.add("kernel", tile.family);
  details.add("Br", tile.Br);
  details.add("Bc", tile.Bc);
  details.add("head_dim", key.head_dim);
  details.add("value_dim", key.value_dim);
}

void describe_copies(std::initializer_list<WhyCopied> tensors, Explanation& plan) {
  Details copies;
  for (const auto& [name, why] : tensors) {
    if (why.empty()) continue;
    copies.add(name, why);
    plan.decisions.push_back(
        fmt::format("{} is copied to rows of multiples of 16 bytes: {}", name, why));
  }
  if (!copies.entries().empty()) plan.details.add("copies", std::move(copies));
}

std::string config_text(const KernelConfig& config) {
  std::string text = "#pragma once\n";
  for (const auto& [name, value] : config.macros)
    text += fmt::format("#define {} {}\n", name, value);
  text += "enum : int {\n";
  for (const auto& [name, value] : config.constants)
    text += fmt::format("  {} = {},\n", name, value);
  return text + "};\n";
}

}  // namespace fulgur::cuda
