#include "cuda/decode/rejects.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "cuda/common/kernel_key.h"
#include "cuda/decode/decode_plan.h"
#include "cuda/passes/forward.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

/// Why Hopper's forward kernel computes a q of codes; empty when it does not, or q has none.
std::string left_to_forward(const Problem& p) {
  if (!is_low_bit(p.dtypes.q)) return {};
  // It multiplies codes of many rows faster. With `invariant` it computes few rows, too, so that
  // the bits of a sequence do not depend on the longest one of its batch.
  const bool forward_takes =
      products_of_codes_rejected(p).empty() && !has_cache(p) && !p.has(Arg::kTreeMask);
  if (forward_takes && (p.invariant || rows_of_kv_head(p) > kFewRows)) {
    return fmt::format(
        "computes contiguous keys for q of {} up to {} rows of a kv head and without `invariant`",
        name_of(p.dtypes.q), kFewRows);
  }
  return {};
}

/// Why q, k and v of these dtypes are not computed; empty when they are.
std::string operands_rejected(const Problem& p) {
  const OperandTypes& types = p.dtypes;
  if (!is_low_bit(types.k) && !is_low_bit(types.v))
    return dtypes_rejected(types, /*takes_f32=*/true);
  if (!is_low_bit(types.q) && types.q != DType::kBF16 && types.q != DType::kF16) {
    return "computes q of bf16, f16, e4m3 and e5m2";
  }
  if (p.q_descale.groups > 1) {
    return fmt::format("takes a q_descale of one group of columns, got {}", p.q_descale.groups);
  }
  return {};
}

}  // namespace

std::string decode_rejects(const Problem& p) {
  std::string why = decode_rejects_few(p);
  if (why.empty() && p.invariant && exceeds_16_bits(p.dtypes))
    return "splits keys of f32, which `invariant` forbids here";
  if (why.empty()) why = left_to_forward(p);
  if (!why.empty() || !rows_decide(p) || deciding_queries(p) <= few_queries(p)) return why;
  return fmt::format(
      "computes `invariant` calls on contiguous keys up to {} rows of a kv head, got {} queries of "
      "{} heads",
      kFewRows, deciding_queries(p), p.group());
}

std::string decode_rejects_few(const Problem& p) {
  if (std::string why = operands_rejected(p); !why.empty()) return why;
  const bool codes = is_low_bit(p.dtypes.k) || is_low_bit(p.dtypes.v);
  if (std::string why =
          dims_rejected(p, codes || exceeds_16_bits(p.dtypes) ? kMaxDims : kMaxWideDims);
      !why.empty())
    return why;
  if (has_wide_heads(p) && p.invariant) {
    return fmt::format("computes d and dv above {} without `invariant`", kMaxDim);
  }
  if (p.dropout_p > 0) return "computes without dropout";
  // Other rows are copied where no other kernel can take the call.
  const bool others_take =
      !rows_decide(p) && !has_wide_heads(p) && !has_cache(p) && !p.has(Arg::kTreeMask) && !codes;
  for (const auto& [name, strides, dtype] :
       {std::tuple{"k", &p.k, p.dtypes.k}, std::tuple{"v", &p.v, p.dtypes.v}}) {
    if (const std::string why = not_whole(*strides, dtype); !why.empty() && others_take) {
      return fmt::format("computes contiguous keys in rows of multiples of 16 bytes: {} {}", name,
                         why);
    }
  }
  const int64_t total_q = p.packed ? p.total_q : 0, total_k = p.packed_k ? p.total_k : 0;
  if (std::max({total_q, total_k, rows_of_kv_head(p), p.sk}) >= kMaxRows) {
    return fmt::format("computes less than 2^29 rows, got {} of q, {} of a kv head and {} keys",
                       total_q, rows_of_kv_head(p), std::max(total_k, p.sk));
  }
  if (std::max({p.cache.entries, p.cache.ids, p.cache.page}) > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 pages of up to 2^31 keys, got {} of {} and {} ids",
                       p.cache.entries, p.cache.page, p.cache.ids);
  }
  // The kernels number the chunks of all q blocks with ints, of blocks as small as they may be.
  const int64_t min_rows = p.invariant && !codes ? kFewRows : 16;
  // Doubles, as with no rows of q there may be any number of its heads.
  const int64_t blocks = std::max<int64_t>(ceil_div(rows_of_kv_head(p), min_rows), 1);
  const double q_blocks =
      static_cast<double>(p.batch) * static_cast<double>(p.hk) * static_cast<double>(blocks);
  const double chunks = q_blocks * (kernels::kTileOverhead + ceil_div(p.sk, kernels::kChunkKeys));
  if (chunks > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 tiles of {} x {}, got {:.3g}", min_rows,
                       int{kernels::kChunkKeys}, chunks);
  }
  return {};
}

}  // namespace fulgur::cuda::decode
