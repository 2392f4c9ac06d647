// The map of tiles (host_device/tile_map.h) of mask_mod, in time that does not grow with the number of scores: the
// hulls of row nodes and key nodes, then the state of each tile by these (maps/node_hulls.cuh). A tile that is called
// hidden or wholly shown is; one that is called partial may be either, as intervals do not show it of every tile.
#include "kernel_config.h"  // first, as it includes attention/hulls.cuh
#include "attention/pages.cuh"
#include "maps/fused_map.cuh"

extern "C" __global__ void __launch_bounds__(256) fulgur_fused_map(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  make_fused_map(p, p.shape, p.words, p.words_of_rows, int(blockIdx.x));
}

// A warp computes a block of rows or a tile of keys.
extern "C" __global__ void __launch_bounds__(128) fulgur_node_hulls(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  const MapShape& of = p.shape;
  const int warp = int(blockIdx.x * 4 + threadIdx.x / 32);
  const int row_warps = of.batches * of.heads * of.row_blocks;
  if (warp < row_warps) {
    store_row_hulls<1>(p, of, warp / of.row_blocks, warp % of.row_blocks, 0, of.row_blocks,
                       p.row_hulls + (long long)(warp) * kRowNodes);
  } else if (warp - row_warps < of.batches * of.key_tiles) {
    const int at = warp - row_warps;
    store_key_hulls<1>(p, at / of.key_tiles, at % of.key_tiles, 0, of.key_tiles,
                       p.key_hulls + (long long)(at) * kKeyNodes);
  }
}

extern "C" __global__ void __launch_bounds__(128) fulgur_tile_map(const __grid_constant__ TileMapParams p) {
  const MapShape& of = p.shape;
  map_tiles(p, [&](int map, int row_block, int key_tile) {
    return tile_state(p, of, map, row_block, key_tile,
                      p.row_hulls + ((long long)(map) * of.row_blocks + row_block) * kRowNodes,
                      p.key_hulls + ((long long)(map / of.heads) * of.key_tiles + key_tile) * kKeyNodes);
  });
}

extern "C" __global__ void __launch_bounds__(128) fulgur_map_of_rows(const __grid_constant__ TileMapParams p) {
  map_rows(p);
}
