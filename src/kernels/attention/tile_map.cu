// The map of tiles (host_device/tile_map.h) of mask_mod, in time that does not grow with the scores. What only rows or
// only keys decide of the mask is computed for each of them, and of its values in a block the interval is kept (a
// panel). The rest of the mask is computed by intervals once a tile: never wrong that a tile is hidden or shown whole,
// though it may not see that one is.
#include "kernel_config.h"  // which has functions for attention/hulls.cuh, and includes it
#include "attention/hulls.cuh"
#include "attention/tile_map.cuh"

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

// Whether a tile has keys that are seen, and whether the mask hides some of them, the bounds of the call apart.
__device__ __forceinline__ TileState tile_state(const TileMapParams& p, int map, int row_block, int key_tile) {
  const MapShape& of = p.shape;
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  const RowRange rows = rows_of_block(n, row_block);
  if (row_block >= of.row_blocks || key_tile >= of.key_tiles || !band_shows(p, n, rows, key_tile))
    return {false, false};
  const Hull mask = expression_hull(expression_place(p, n, batch, head, 0, 0),
                                    p.row_hulls + ((long long)(map) * of.row_blocks + row_block) * kRowPanels,
                                    p.key_hulls + ((long long)(batch) * of.key_tiles + key_tile) * kKeyPanels);
  return {mask.high != 0, mask.high != 0 && mask.low != 1};
}

extern "C" __global__ void __launch_bounds__(128) fulgur_tile_map(const __grid_constant__ TileMapParams p) {
  map_tiles(p, [&](int map, int row_block, int key_tile) { return tile_state(p, map, row_block, key_tile); });
}

extern "C" __global__ void __launch_bounds__(128) fulgur_map_of_rows(const __grid_constant__ TileMapParams p) {
  map_rows(p);
}
