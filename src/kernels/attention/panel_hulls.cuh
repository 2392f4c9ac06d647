// What mask_mod shows of tiles of scores, by the intervals (hulls) in which the values of its panels lie: of what only
// rows, or only keys, decide, in a block of rows or a tile of keys.
#pragma once
#include "kernel_config.h"  // which has functions for attention/hulls.cuh
#include "attention/hulls.cuh"
#include "attention/tile_map.cuh"

// Rows or keys of a block, each lane's.
constexpr int kRowsOfLane = ((kBlockStrips > 0 ? kStripRows * kBlockStrips : +kBlockRows) + 31) / 32;
constexpr int kKeysOfLane = (kBlockKeys + 31) / 32;

// The hulls of the panels of some blocks by a warp, whose values are asked for at once: values(row or key, ...) has
// those of one. range(n) are those of the n-th block, maybe none, and its hulls go to(n), unless that is null. Lanes
// that have none left look at the last one again, which changes no hull.
template <int panels, int of_lane, int blocks, class Values, class Range, class To>
__device__ __forceinline__ void store_hulls(const Values& values, const Range& range, const To& to) {
  if constexpr (panels > 0) {
    const int lane = threadIdx.x % 32;
    int x[blocks][of_lane][panels];
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      const RowRange of = range(n);
#pragma unroll
      for (int j = 0; j < of_lane; ++j) values(max(min(of.begin + 32 * j + lane, of.end - 1), 0), x[n][j]);
    }
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      PanelHull* const hulls = to(n);
#pragma unroll
      for (int i = 0; i < panels; ++i) {
        int low = x[n][0][i], high = low;
        u64 hashes = hash_of(low);
#pragma unroll
        for (int j = 1; j < of_lane; ++j) {
          low = min(low, x[n][j][i]);
          high = max(high, x[n][j][i]);
          hashes |= hash_of(x[n][j][i]);
        }
        low = __reduce_min_sync(0xffffffff, low);
        high = __reduce_max_sync(0xffffffff, high);
        const u32 first = __reduce_or_sync(0xffffffff, u32(hashes));
        const u32 second = __reduce_or_sync(0xffffffff, u32(hashes >> 32));
        if (lane == 0 && hulls != nullptr) hulls[i] = {low, high, u64(second) << 32 | first};
      }
    }
  }
}

// Of blocks of rows of a map from `first` on, each `step` after the one before, up to `end`.
template <int blocks, class Params>
__device__ __forceinline__ void store_row_hulls(const Params& p, const MapShape& of, int map, int first, int step,
                                                int end, PanelHull* to) {
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  store_hulls<kRowPanels, kRowsOfLane, blocks>(
      [&](int row, int* x) { expression_rows(expression_place(p, n, batch, head, row, 0), x); },
      [&](int i) { return rows_of_block(n, first + i * step); },
      [&](int i) { return first + i * step < end ? to + i * step * kRowPanels : nullptr; });
}

// Of tiles of keys of a sequence, likewise.
template <int tiles, class Params>
__device__ __forceinline__ void store_key_hulls(const Params& p, int batch, int first, int step, int end,
                                                PanelHull* to) {
  const Lengths n = lengths_of(p, batch);
  store_hulls<kKeyPanels, kKeysOfLane, tiles>(
      [&](int key, int* x) { expression_keys(expression_place(p, n, batch, 0, 0, key), x); },
      [&](int i) {
        const KeyRange keys = keys_of_tile(n, first + i * step);
        return RowRange{keys.begin, keys.end};
      },
      [&](int i) { return first + i * step < end ? to + i * step * kKeyPanels : nullptr; });
}

// Whether a tile has keys that are seen, and whether the mask hides some of them, the bounds of the call apart. `rows`
// and `keys`: the hulls of its block of rows and of its keys.
template <class Params>
__device__ __forceinline__ TileState tile_state(const Params& p, const MapShape& of, int map, int row_block,
                                                int key_tile, const PanelHull* rows, const PanelHull* keys) {
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  if (row_block >= of.row_blocks || key_tile >= of.key_tiles ||
      !band_shows(p, n, rows_of_block(n, row_block), key_tile))
    return {false, false};
  const Hull mask = expression_hull(expression_place(p, n, batch, head, 0, 0), rows, keys);
  return {mask.high != 0, mask.high != 0 && mask.low != 1};
}

// Tiles whose hulls a warp makes at once.
enum : int { kTilesAtOnce = 4 };

// Of a CTA that makes a map by itself: hulls of its own blocks, and of all tiles that meet them.
enum : int {
  kHullPanels = min_of(max_of(max_of(kRowPanels, kKeyPanels), 1), +kMaxOwnPanels),
  kOwnHulls = kOwnBlocks * kHullPanels,
  kAllHulls = kOwnHulls + kMaxOwnTiles * kHullPanels,
};

// The words of blocks [first, first + kOwnBlocks) of rows, or of tiles of keys, by all threads of a CTA, which has room
// for their hulls and those of the tiles that meet them.
template <bool by_keys, class Params>
__device__ __forceinline__ void make_words(const Params& p, const MapShape& of, int map, int first,
                                           PanelHull* own, u64* to) {
  PanelHull* const others = own + kOwnHulls;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int blocks = by_keys ? of.key_tiles : of.row_blocks, tiles = by_keys ? of.row_blocks : of.key_tiles;
  const int batch = map / of.heads, words = map_words(tiles), count = min(blocks - first, +kOwnBlocks);
  if (warp < count) {
    if constexpr (by_keys) store_key_hulls<1>(p, batch, first + warp, 0, blocks, own + warp * kKeyPanels);
    else store_row_hulls<1>(p, of, map, first + warp, 0, blocks, own + warp * kRowPanels);
  }
#pragma unroll 1
  for (int at = warp; at < tiles; at += kTilesAtOnce * warps) {
    if constexpr (by_keys)
      store_row_hulls<kTilesAtOnce>(p, of, map, at, warps, tiles, others + at * kRowPanels);
    else
      store_key_hulls<kTilesAtOnce>(p, batch, at, warps, tiles, others + at * kKeyPanels);
  }
  __syncthreads();
#pragma unroll 1
  for (int at = warp; at < count * words; at += warps) {
    const int i = at / words, word = at % words, tile = 32 * word + lane;
    const TileState is =
        by_keys ? tile_state(p, of, map, tile, first + i, others + tile * kRowPanels, own + i * kKeyPanels)
                : tile_state(p, of, map, first + i, tile, own + i * kRowPanels, others + tile * kKeyPanels);
    const u32 seen = __ballot_sync(0xffffffff, is.seen);
    const u64 partial = __ballot_sync(0xffffffff, is.partial);
    if (lane == 0) to[((long long)(map) * blocks + first + i) * words + word] = partial << 32 | seen;
  }
}

// What CTA `number` makes of the maps, with those of rows where there are some of both (host_device/tile_map.h).
template <class Params>
__device__ __forceinline__ void make_maps(const Params& p, const MapShape& of, const SeenWords& map,
                                          const SeenWords& map_of_rows, int number) {
  __shared__ PanelHull hulls[kAllHulls];
  const int maps = of.batches * of.heads;
  const int blocks = kMapByKeys ? of.key_tiles : of.row_blocks, tiles = kMapByKeys ? of.row_blocks : of.key_tiles;
  const int parts = (blocks + kOwnBlocks - 1) / kOwnBlocks;
  if (number < maps * parts) {
    make_words<kMapByKeys != 0>(p, of, number / parts, number % parts * kOwnBlocks, hulls, const_cast<u64*>(map.words));
  } else if constexpr (kMapOfRows != 0) {
    const int rest = number - maps * parts, others = (tiles + kOwnBlocks - 1) / kOwnBlocks;
    if (rest < maps * others)
      make_words<kMapByKeys == 0>(p, of, rest / others, rest % others * kOwnBlocks, hulls,
                                  const_cast<u64*>(map_of_rows.words));
  }
}
