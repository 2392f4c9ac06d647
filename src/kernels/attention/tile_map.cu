// The map of tiles (host_device/tile_map.h) of mask_mod, in time that does not grow with the scores. What only rows or
// only keys decide of the mask is computed for each of them, and of its values in a block the interval is kept (a
// panel). The rest of the mask is computed by intervals once a tile: never wrong that a tile is hidden or shown whole,
// though it may not see that one is.
#include "kernel_config.h"  // which has functions for attention/hulls.cuh, and includes it
#include "attention/hulls.cuh"
#include "attention/mask.cuh"
#include "attention/pages.cuh"
#include "device/dependent_launch.cuh"

// Of a block, in their sequence. Both may be empty.
__device__ __forceinline__ RowRange rows_of_block(const Lengths& n, int block) {
  if constexpr (kBlockStrips > 0)
    return {kStripRows * first_strip(n.sq, kBlockStrips, block),
            min(kStripRows * first_strip(n.sq, kBlockStrips, block + 1), n.sq)};
  else
    return {kBlockRows * block, min(kBlockRows * (block + 1), n.sq)};
}

__device__ __forceinline__ KeyRange keys_of_tile(const Lengths& n, int tile) {
  return {kBlockKeys * tile, min(kBlockKeys * (tile + 1), n.sk)};
}

// The hulls of a block's panels by a warp. values(i, ...) has those of its i-th row or key.
template <int panels, class Values>
__device__ __forceinline__ void store_hulls(PanelHull* to, int count, const Values& values) {
  const int lane = threadIdx.x % 32;
  int low[panels + 1], high[panels + 1];
  u32 hashes[panels + 1][2];
#pragma unroll
  for (int i = 0; i < panels; ++i) low[i] = 0x7fffffff, high[i] = -0x7fffffff - 1, hashes[i][0] = hashes[i][1] = 0;
  for (int at = lane; at < count; at += 32) {
    int x[panels + 1];
    values(at, x);
#pragma unroll
    for (int i = 0; i < panels; ++i) {
      low[i] = min(low[i], x[i]);
      high[i] = max(high[i], x[i]);
      const u64 hash = hash_of(x[i]);
      hashes[i][0] |= u32(hash);
      hashes[i][1] |= u32(hash >> 32);
    }
  }
#pragma unroll
  for (int i = 0; i < panels; ++i) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      low[i] = min(low[i], __shfl_xor_sync(0xffffffff, low[i], bit));
      high[i] = max(high[i], __shfl_xor_sync(0xffffffff, high[i], bit));
      hashes[i][0] |= __shfl_xor_sync(0xffffffff, hashes[i][0], bit);
      hashes[i][1] |= __shfl_xor_sync(0xffffffff, hashes[i][1], bit);
    }
    if (lane == 0) to[i] = {low[i], high[i], u64(hashes[i][1]) << 32 | hashes[i][0]};
  }
}

// A warp takes a block of rows or a tile of keys.
extern "C" __global__ void __launch_bounds__(128) fulgur_panel_hulls(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  const MapShape& of = p.shape;
  const int warp = int(blockIdx.x * 4 + threadIdx.x / 32);
  const int row_warps = of.batches * of.heads * of.row_blocks;
  if (warp < row_warps) {
    const int map = warp / of.row_blocks;
    const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
    const Lengths n = lengths_of(p, batch);
    const RowRange rows = rows_of_block(n, warp % of.row_blocks);
    store_hulls<kRowPanels>(p.row_hulls + (long long)(warp) * kRowPanels, rows.end - rows.begin, [&](int i, int* x) {
      expression_rows(expression_place(p, n, batch, head, rows.begin + i, 0), x);
    });
  } else if (warp - row_warps < of.batches * of.key_tiles) {
    const int at = warp - row_warps;
    const int batch = at / of.key_tiles;
    const Lengths n = lengths_of(p, batch);
    const KeyRange keys = keys_of_tile(n, at % of.key_tiles);
    store_hulls<kKeyPanels>(p.key_hulls + (long long)(at) * kKeyPanels, keys.end - keys.begin, [&](int i, int* x) {
      expression_keys(expression_place(p, n, batch, 0, 0, keys.begin + i), x);
    });
  }
}

struct TileState {
  bool seen, partial;
};

__device__ __forceinline__ TileState tile_state(const TileMapParams& p, int map, int row_block, int key_tile) {
  const MapShape& of = p.shape;
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  const RowRange rows = rows_of_block(n, row_block);
  if (row_block >= of.row_blocks || key_tile >= of.key_tiles || rows.begin >= rows.end) return {false, false};
  const KeyTiles seen = key_tiles(band_of(p), n, kBlockKeys, rows.begin, rows.end - 1);
  if (key_tile < seen.begin || key_tile >= seen.end) return {false, false};
  const Hull mask = expression_hull(expression_place(p, n, batch, head, 0, 0),
                                    p.row_hulls + ((long long)(map) * of.row_blocks + row_block) * kRowPanels,
                                    p.key_hulls + ((long long)(batch) * of.key_tiles + key_tile) * kKeyPanels);
  const int key = kBlockKeys * key_tile;
  const bool band_hides = is_partial(keys_seen_by_all(p, n, rows.begin, rows.end - 1), key, key + kBlockKeys);
  return {mask.high != 0, mask.high != 0 && (mask.low != 1 || band_hides)};
}

// A warp takes a word, a lane a tile.
extern "C" __global__ void __launch_bounds__(128) fulgur_tile_map(const __grid_constant__ TileMapParams p) {
  wait_for_earlier_kernels();
  const MapShape& of = p.shape;
  const int blocks = kMapByKeys ? of.key_tiles : of.row_blocks;
  const int words = map_words(kMapByKeys ? of.row_blocks : of.key_tiles);
  const long long warp = (long long)(blockIdx.x) * 4 + threadIdx.x / 32;
  const long long block_of_map = warp / words;
  const int map = int(block_of_map / blocks);
  if (map >= of.batches * of.heads) return;
  const int block = int(block_of_map - (long long)(map) * blocks);
  const int tile = int(warp - block_of_map * words) * 32 + int(threadIdx.x % 32);
  const TileState is = tile_state(p, map, kMapByKeys ? tile : block, kMapByKeys ? block : tile);
  const u64 seen = __ballot_sync(0xffffffff, is.seen);
  const u64 partial = __ballot_sync(0xffffffff, is.partial);
  if (threadIdx.x % 32 == 0) p.words[warp] = partial << 32 | seen;
}

// The words of blocks of rows from those of tiles of keys, kMapByKeys. A warp takes a word of 32 tiles of keys, for 32
// blocks of rows; a lane has a tile, then a block.
extern "C" __global__ void __launch_bounds__(128) fulgur_map_of_rows(const __grid_constant__ TileMapParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const MapShape& of = p.shape;
  const int row_words = map_words(of.row_blocks), key_words = map_words(of.key_tiles);
  const int lane = threadIdx.x % 32;
  const int warp = int(blockIdx.x * 4 + threadIdx.x / 32);
  const int map = warp / (row_words * key_words);
  if (map >= of.batches * of.heads) return;
  const int rows = warp / key_words % row_words, keys = warp % key_words;
  const int tile = 32 * keys + lane;
  const u64 mine = tile < of.key_tiles ? p.words[((long long)(map) * of.key_tiles + tile) * row_words + rows] : 0;
  u64 word = 0;
#pragma unroll
  for (int row = 0; row < 32; ++row) {
    const u64 seen = __ballot_sync(0xffffffff, mine >> row & 1);
    const u64 partial = __ballot_sync(0xffffffff, mine >> (32 + row) & 1);
    if (lane == row) word = partial << 32 | seen;
  }
  const int block = 32 * rows + lane;
  if (block < of.row_blocks) p.words_of_rows[((long long)(map) * of.row_blocks + block) * key_words + keys] = word;
}
