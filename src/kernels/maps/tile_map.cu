// The map of tiles (host_device/tile_map.h) of mask_mod, in time that does not grow with the scores. What only rows or
// only keys decide of the mask is computed for each of them, and of its values in a block the interval is kept (a
// panel). The rest of the mask is computed by intervals once a tile: never wrong that a tile is hidden or shown whole,
// though it may not see that one is.
#include "kernel_config.h"  // first, as it includes attention/hulls.cuh
#include "attention/pages.cuh"
#include "attention/panel_hulls.cuh"

// All of it at once, where that takes less than two kernels one after the other.
extern "C" __global__ void __launch_bounds__(256) fulgur_map_at_once(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  SeenWords map = p.expression.map, map_of_rows = map;
  map.words = p.words, map_of_rows.words = p.words_of_rows;
  make_maps(p, p.shape, map, map_of_rows, int(blockIdx.x));
}

// A warp takes a block of rows or a tile of keys.
extern "C" __global__ void __launch_bounds__(128) fulgur_panel_hulls(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  const MapShape& of = p.shape;
  const int warp = int(blockIdx.x * 4 + threadIdx.x / 32);
  const int row_warps = of.batches * of.heads * of.row_blocks;
  if (warp < row_warps) {
    store_row_hulls<1>(p, of, warp / of.row_blocks, warp % of.row_blocks, 0, of.row_blocks,
                       p.row_hulls + (long long)(warp) * kRowPanels);
  } else if (warp - row_warps < of.batches * of.key_tiles) {
    const int at = warp - row_warps;
    store_key_hulls<1>(p, at / of.key_tiles, at % of.key_tiles, 0, of.key_tiles,
                       p.key_hulls + (long long)(at) * kKeyPanels);
  }
}

extern "C" __global__ void __launch_bounds__(128) fulgur_tile_map(const __grid_constant__ TileMapParams p) {
  const MapShape& of = p.shape;
  map_tiles(p, [&](int map, int row_block, int key_tile) {
    return tile_state(p, of, map, row_block, key_tile,
                      p.row_hulls + ((long long)(map) * of.row_blocks + row_block) * kRowPanels,
                      p.key_hulls + ((long long)(map / of.heads) * of.key_tiles + key_tile) * kKeyPanels);
  });
}

extern "C" __global__ void __launch_bounds__(128) fulgur_map_of_rows(const __grid_constant__ TileMapParams p) {
  map_rows(p);
}
