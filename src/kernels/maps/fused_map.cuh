// The fused map of mask_mod: hulls and words by one kernel, where that takes less time than two kernels that run one
// after the other. A CTA keeps in shared memory the hulls of its kFusedBlocks blocks and those of all tiles, which each
// CTA computes again.
#pragma once
#include "kernel_config.h"  // first, as it includes attention/hulls.cuh
#include "maps/node_hulls.cuh"

enum : int {
  kTilesAtOnce = 4,  // whose hulls a warp computes together
  kHullNodes = min_of(max_of(max_of(kRowNodes, kKeyNodes), 1), +kMaxFusedNodes),
  kBlockHulls = kFusedBlocks * kHullNodes,
  kSharedHulls = kBlockHulls + kMaxFusedTiles * kHullNodes,
};

// Stores the words of blocks [first, first + kFusedBlocks) of rows, or of tiles of keys, by all threads of a CTA.
// `hulls`: kSharedHulls of shared memory, first those of the blocks, then those of the tiles.
template <bool by_keys, class Params>
__device__ __forceinline__ void store_fused_words(const Params& p, const MapShape& of, int map, int first,
                                                  NodeHull* hulls, u64* to) {
  NodeHull* const tile_hulls = hulls + kBlockHulls;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int blocks = by_keys ? of.key_tiles : of.row_blocks, tiles = by_keys ? of.row_blocks : of.key_tiles;
  const int batch = map / of.heads, words = map_words(tiles), count = min(blocks - first, +kFusedBlocks);
  if (warp < count) {
    if constexpr (by_keys) store_key_hulls<1>(p, batch, first + warp, 0, blocks, hulls + warp * kKeyNodes);
    else store_row_hulls<1>(p, of, map, first + warp, 0, blocks, hulls + warp * kRowNodes);
  }
#pragma unroll 1
  for (int at = warp; at < tiles; at += kTilesAtOnce * warps) {
    if constexpr (by_keys)
      store_row_hulls<kTilesAtOnce>(p, of, map, at, warps, tiles, tile_hulls + at * kRowNodes);
    else
      store_key_hulls<kTilesAtOnce>(p, batch, at, warps, tiles, tile_hulls + at * kKeyNodes);
  }
  __syncthreads();
#pragma unroll 1
  for (int at = warp; at < count * words; at += warps) {
    const int i = at / words, word = at % words, tile = 32 * word + lane;
    const TileState is =
        by_keys ? tile_state(p, of, map, tile, first + i, tile_hulls + tile * kRowNodes, hulls + i * kKeyNodes)
                : tile_state(p, of, map, first + i, tile, hulls + i * kRowNodes, tile_hulls + tile * kKeyNodes);
    const u64 of_tiles = map_word(is.seen, is.partial);
    if (lane == 0) to[((long long)(map) * blocks + first + i) * words + word] = of_tiles;
  }
}

// The part of CTA `cta` of fused_map_ctas: blocks of the map, and after all of these, with kMapOfRows, those of the map
// by rows.
template <class Params>
__device__ __forceinline__ void make_fused_map(const Params& p, const MapShape& of, u64* words, u64* words_of_rows,
                                               int cta) {
  __shared__ NodeHull hulls[kSharedHulls];
  const int maps = of.batches * of.heads;
  const int blocks = kMapByKeys ? of.key_tiles : of.row_blocks, tiles = kMapByKeys ? of.row_blocks : of.key_tiles;
  const int parts = (blocks + kFusedBlocks - 1) / kFusedBlocks;
  if (cta < maps * parts) {
    store_fused_words<kMapByKeys != 0>(p, of, cta / parts, cta % parts * kFusedBlocks, hulls, words);
  } else if constexpr (kMapOfRows != 0) {
    const int rest = cta - maps * parts, others = (tiles + kFusedBlocks - 1) / kFusedBlocks;
    if (rest < maps * others)
      store_fused_words<kMapByKeys == 0>(p, of, rest / others, rest % others * kFusedBlocks, hulls, words_of_rows);
  }
}
