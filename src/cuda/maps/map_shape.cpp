#include "cuda/maps/map_shape.h"

#include <algorithm>

#include "cuda/common/expression.h"
#include "cuda/common/kernel_key.h"
#include "kernels/host_device/strips.h"

namespace fulgur::cuda {
namespace {

// Each CTA of a fused map computes the hulls of all keys of a sequence, or of all its rows, so only
// short calls have one. The forward kernel waits for it; kernels that prepare rows have work
// meanwhile, and may make larger ones.
constexpr int kMaxFusedRows = 4096, kMaxPreparedRows = 16384;

/// Whether a fused map may be made, of up to `max_rows` rows and as many keys.
bool may_fuse(const Problem& p, const MapTiles& tiles, int64_t max_rows) {
  if (!p.expressions.masks() || p.invariant || std::max(p.sq, p.sk) > max_rows) return false;
  const kernels::MapShape shape = map_shape(p, tiles);
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  return std::max(shape.row_blocks, shape.key_tiles) <= kernels::kMaxFusedTiles &&
         std::min(shape.row_blocks, shape.key_tiles) > 0 &&
         std::max(mask.row_nodes, mask.key_nodes) <= kernels::kMaxFusedNodes;
}

}  // namespace

bool fuses_map(const Problem& p, const MapTiles& tiles) {
  return may_fuse(p, tiles, kMaxFusedRows);
}

bool prepares_map(const Problem& p, const MapTiles& tiles) {
  return may_fuse(p, tiles, kMaxPreparedRows);
}

kernels::MapShape map_shape(const Problem& p, const MapTiles& tiles) {
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  kernels::MapShape shape{};
  const bool is_bool_mask = !p.expressions.masks();
  const bool of_batch =
      mask.of_batch || (is_bool_mask && p.bias.batch != 0) || !p.alike() || has_cache(p);
  shape.batches = static_cast<int>(of_batch ? p.batch : std::min<int64_t>(p.batch, 1));
  const bool of_heads = mask.of_heads || (is_bool_mask && p.bias.head != 0);
  const int64_t heads = of_heads ? p.hq : mask.of_kv_heads ? p.hk : 1;
  shape.heads = static_cast<int>(std::max<int64_t>(heads, 1));
  shape.heads_of_map = static_cast<int>(p.hq) / shape.heads;
  shape.row_blocks = tiles.block_strips > 0
                         ? kernels::blocks_of(static_cast<int>(p.sq), tiles.block_strips)
                         : ceil_div(p.sq, tiles.block_rows);
  shape.key_tiles = ceil_div(p.sk, tiles.block_keys);
  return shape;
}

int64_t words_of_maps(const kernels::MapShape& shape, bool by_keys) {
  const int64_t maps = int64_t{shape.batches} * shape.heads;
  return by_keys ? maps * shape.key_tiles * kernels::block_words(shape.row_blocks)
                 : maps * shape.row_blocks * kernels::block_words(shape.key_tiles);
}

kernels::SeenWords seen_words(const kernels::MapShape& shape, bool by_keys) {
  kernels::SeenWords map{};
  map.heads_of_map = shape.heads_of_map;
  map.block = kernels::block_words(by_keys ? shape.row_blocks : shape.key_tiles);
  const int64_t words = int64_t{map.block} * (by_keys ? shape.key_tiles : shape.row_blocks);
  map.head = shape.heads > 1 ? words : 0;
  map.batch = shape.batches > 1 ? words * shape.heads : 0;
  return map;
}

HullCounts hull_counts(const Problem& p, const kernels::MapShape& shape) {
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  const auto batches = int64_t{shape.batches};
  return {batches * shape.heads * shape.row_blocks * mask.row_nodes,
          batches * shape.key_tiles * mask.key_nodes};
}

}  // namespace fulgur::cuda
