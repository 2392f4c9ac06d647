#include "cuda/common/tile_map.h"

#include <algorithm>

#include "cuda/common/expression.h"
#include "cuda/common/launch.h"
#include "engine/workspace.h"
#include "kernels/host_device/strips.h"

namespace fulgur::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;  // of a CTA

constexpr const char* kHulls = "fulgur_panel_hulls";
constexpr const char* kMap = "fulgur_tile_map";
constexpr const char* kMapOfRows = "fulgur_map_of_rows";

/// What kernel_config.h fixes of attention/tile_map.cu: the mask and the lengths.
struct MapKey : AnyForwardKey {
  MapTiles tiles;

  template <class F>
  void for_each_field(const F& f) const {
    AnyForwardKey::for_each_field(f);
    f("kBlockStrips", tiles.block_strips);
    f("kBlockRows", tiles.block_rows);
    f("kBlockKeys", tiles.block_keys);
    f("kMapByKeys", tiles.by_keys);
    f("kEarlyStarts", tiles.early_starts);
  }
};

KernelRequest request(const AnyForwardKey& of, const MapTiles& tiles) {
  MapKey key;
  key.has_left = of.has_left;
  key.has_right = of.has_right;
  key.has_chunk = of.has_chunk;
  key.top_left = of.top_left;
  key.part = of.part;
  key.tree = of.tree;
  key.mask_mod = of.mask_mod;
  key.packed = of.packed;
  key.packed_k = of.packed_k;
  key.seqused_q = of.seqused_q;
  key.seqused_k = of.seqused_k;
  key.page = of.page;
  key.page_lists = of.page_lists;
  key.batch_idx = of.batch_idx;
  key.leftpad = of.leftpad;
  key.few_queries = of.few_queries;
  key.expressions = of.mask_hulls;
  key.tiles = tiles;
  return {"attention/tile_map.cu", kernel_config(key)};
}

/// What of a map differs, and what is the same.
kernels::MapShape shape_of(const Problem& p, const MapTiles& tiles) {
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  kernels::MapShape shape{};
  const bool of_batch = mask.of_batch || !p.alike() || has_cache(p);
  shape.batches = static_cast<int>(of_batch ? p.batch : std::min<int64_t>(p.batch, 1));
  const int64_t heads = mask.of_heads ? p.hq : mask.of_kv_heads ? p.hk : 1;
  shape.heads = static_cast<int>(std::max<int64_t>(heads, 1));
  shape.heads_of_map = static_cast<int>(p.hq) / shape.heads;
  shape.row_blocks = tiles.block_strips > 0
                         ? kernels::blocks_of(static_cast<int>(p.sq), tiles.block_strips)
                         : ceil_div(p.sq, tiles.block_rows);
  shape.key_tiles = ceil_div(p.sk, tiles.block_keys);
  return shape;
}

/// Of rows, and of keys.
struct HullCounts {
  int64_t rows, keys;
};
HullCounts hulls_of(const Problem& p, const kernels::MapShape& shape) {
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  const auto batches = int64_t{shape.batches};
  return {batches * shape.heads * shape.row_blocks * mask.row_panels,
          batches * shape.key_tiles * mask.key_panels};
}

/// A map without its address.
kernels::SeenWords map_of(const kernels::MapShape& shape, bool by_keys) {
  kernels::SeenWords map{};
  map.heads_of_map = shape.heads_of_map;
  map.block = kernels::block_words(by_keys ? shape.row_blocks : shape.key_tiles);
  const int64_t words = int64_t{map.block} * (by_keys ? shape.key_tiles : shape.row_blocks);
  map.head = shape.heads > 1 ? words : 0;
  map.batch = shape.batches > 1 ? words * shape.heads : 0;
  return map;
}

int64_t words_of(const kernels::MapShape& shape, bool by_keys) {
  const int64_t maps = int64_t{shape.batches} * shape.heads;
  return by_keys ? maps * shape.key_tiles * kernels::block_words(shape.row_blocks)
                 : maps * shape.row_blocks * kernels::block_words(shape.key_tiles);
}

/// Of the map the other way round, where kernels want it.
int64_t words_of_rows(const kernels::MapShape& shape, const MapTiles& tiles) {
  return tiles.of_rows_too ? words_of(shape, !tiles.by_keys) : 0;
}

}  // namespace

void describe_map(const KernelKey& key, Explanation& to) {
  if (!key.maps_tiles) return;
  to.details.add("maps_tiles", true);
  to.decisions.emplace_back(
      "a map says which tiles mask_mod hides, which are skipped, and which it shows whole: made in "
      "each run, by the intervals in which values lie");
}

void add_map_kernels(const AnyForwardKey& key, const MapTiles& tiles,
                     std::vector<KernelUse>& kernels) {
  if (!key.maps_tiles) return;
  for (const char* entry : {kHulls, kMap}) kernels.push_back({request(key, tiles), entry, 0});
  if (tiles.of_rows_too) kernels.push_back({request(key, tiles), kMapOfRows, 0});
}

int64_t TileMap::bytes(const Problem& p, const KernelKey& key, const MapTiles& tiles) {
  if (!key.maps_tiles) return 0;
  const kernels::MapShape shape = shape_of(p, tiles);
  const HullCounts hulls = hulls_of(p, shape);
  return (hulls.rows + hulls.keys) * int64_t{sizeof(kernels::PanelHull)} +
         (words_of(shape, tiles.by_keys) + words_of_rows(shape, tiles)) *
             int64_t{sizeof(kernels::u64)};
}

TileMap::TileMap(const Problem& p, const AnyForwardKey& key, const MapTiles& tiles, Gpu& gpu) {
  if (!key.maps_tiles) return;
  shape_ = shape_of(p, tiles);
  by_keys_ = tiles.by_keys;
  words_ = words_of(shape_, tiles.by_keys);
  words_of_rows_ = words_of_rows(shape_, tiles);
  if (tiles.early_starts) map_starts_ = Start::kEarly;
  hulls_kernel_ = gpu.kernel({request(key, tiles), kHulls, 0}).function;
  map_kernel_ = gpu.kernel({request(key, tiles), kMap, 0}).function;
  if (tiles.of_rows_too) rows_kernel_ = gpu.kernel({request(key, tiles), kMapOfRows, 0}).function;
  const HullCounts hulls = hulls_of(p, shape_);
  row_hulls_ = hulls.rows;
  hulls_ = hulls.rows + hulls.keys;
  map_ = map_of(shape_, tiles.by_keys);
  map_of_rows_ = map_of(shape_, !tiles.by_keys);
}

void TileMap::launch(CUstream stream, char* memory, const AttentionParams& call,
                     kernels::ExpressionArguments& tell) const {
  if (words_ == 0) return;
  TileMapParams params{};
  static_cast<AttentionParams&>(params) = call;
  params.shape = shape_;
  params.row_hulls = reinterpret_cast<kernels::PanelHull*>(memory);
  params.key_hulls = params.row_hulls + row_hulls_;
  params.words = reinterpret_cast<kernels::u64*>(params.row_hulls + hulls_);
  params.words_of_rows = params.words + words_;
  const int64_t maps = int64_t{shape_.batches} * shape_.heads;
  const int64_t blocks = maps * shape_.row_blocks + int64_t{shape_.batches} * shape_.key_tiles;
  if (hulls_ > 0) {
    cuda::launch(stream, hulls_kernel_, &params, Grid{ceil_div(blocks, kWarps)}, kThreads, 0,
                 "launching the kernel of the intervals of mask_mod");
  }
  const int64_t mapped = maps * (by_keys_ ? shape_.key_tiles : shape_.row_blocks);
  cuda::launch(stream, map_kernel_, &params, Grid{static_cast<int>(mapped)}, kThreads, 0,
               "launching the kernel of the map of tiles", map_starts_);
  tell.map = map_;
  tell.map.words = params.words;
  if (rows_kernel_ == nullptr) return;
  const int64_t turned = maps * kernels::map_words(shape_.row_blocks);
  cuda::launch(stream, rows_kernel_, &params, Grid{static_cast<int>(turned)}, kThreads, 0,
               "launching the kernel of the map of rows", map_starts_);
  tell.map_of_rows = map_of_rows_;
  tell.map_of_rows.words = params.words_of_rows;
}

}  // namespace fulgur::cuda
