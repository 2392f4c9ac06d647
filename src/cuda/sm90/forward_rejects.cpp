#include "cuda/sm90/forward_rejects.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cuda/common/tensor_map.h"
#include "cuda/passes/forward.h"
#include "cuda/sm90/forward_schedule.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int kBoxRows = 8;  // the period of the swizzle: boxes of a tile begin at multiples of it
constexpr int kMaxChunkPagesDim = 192;

/// Why it does not compute keys in such pages; empty if it does.
std::string pages_rejected(const Problem& p) {
  // The bits of a decoding step must not depend on its batch, so a decode kernel computes all
  // invariant calls with pages.
  if (p.invariant) return "computes pages without `invariant`";
  if (p.cache.page % kBoxRows != 0) {
    return fmt::format("computes pages of multiples of {} keys, got {}", kBoxRows, p.cache.page);
  }
  if (p.cache.ids * p.cache.page > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 keys in lists of pages, got {} pages of {}",
                       p.cache.ids, p.cache.page);
  }
  // With page ids the widest heads have no registers left for chunks.
  if (chunk_binds(p) && std::max(p.d, p.dv) > kMaxChunkPagesDim) {
    return fmt::format("computes chunks over pages with d and dv up to {}, got {} and {}",
                       kMaxChunkPagesDim, p.d, p.dv);
  }
  const ForwardShapes maps = forward_shapes(p, kAnyBlockKeys);
  for (const auto& [name, shape] : {std::pair{"k", &maps.k}, std::pair{"v", &maps.v}}) {
    if (const std::string why = not_addressable(*shape); !why.empty()) {
      return fmt::format("computes pages that TMA can address: of {}, {}", name, why);
    }
  }
  return {};
}

}  // namespace

std::string forward_rejects(const Problem& p) {
  const bool codes = is_low_bit(p.dtypes.q);
  const std::string dtypes = codes ? products_of_codes_rejected(p) : dtypes_rejected(p.dtypes);
  if (!dtypes.empty()) return dtypes;
  if (codes && p.cache.paged()) return "computes e4m3 without pages";
  if (p.has(Arg::kTreeMask)) return "computes without tree masks";
  if (std::string why = sizes_rejected(p); !why.empty()) return why;
  if (rows_decide(p) && deciding_queries(p) <= few_queries(p)) {
    return fmt::format(
        "computes `invariant` calls from {} rows of a kv head on, got {} queries of {} heads",
        kFewRows + 1, deciding_queries(p), p.group());
  }
  if (p.cache.paged()) {
    if (const std::string why = pages_rejected(p); !why.empty()) return why;
  }
  if (p.has(Arg::kCacheBatchIdx))
    return "computes sequence b from row b of k: not with a cache_batch_idx";
  if (p.has(Arg::kLeftpadK)) return "computes keys from the first on: not with a leftpad_k";
  if (p.packed != p.packed_k && !p.cache.paged()) {
    return "computes packed queries with packed keys or pages alone";
  }
  const ForwardShapes maps = forward_shapes(p, kAnyBlockKeys);
  for (const auto& [name, shape] : {std::pair{"q", &maps.q}, std::pair{"k", &maps.k},
                                    std::pair{"v", &maps.v}, std::pair{"out", &maps.o}}) {
    if (const std::string why = rows_unsupported(*shape); !why.empty()) {
      return fmt::format("{} {}", name, why);
    }
  }
  // Blocks of the minimum of rows bound the number of work tiles, which the kernel counts with
  // ints.
  const int64_t blocks = std::max<int64_t>((p.sq + 127) / 128, 1);
  // Products of doubles cannot overflow: without rows of q it may have any number of heads.
  const double heads = static_cast<double>(p.batch) * static_cast<double>(p.hq);
  if (heads * static_cast<double>(blocks) * kMaxSplits > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^28 row blocks, got {:.0f} heads of {}", heads, blocks);
  }
  return {};
}

}  // namespace fulgur::cuda::sm90
