// Which tiles of S mask_mod shows, by interval arithmetic. A row node is a node of mask_mod whose value depends on the
// row only, a key node one whose value depends on the key only. Row nodes are computed for each row and key nodes for
// each key; the hull of a node is the interval of its values in a block of rows or a tile of keys. The hulls of nodes
// that depend on both are computed from the hulls of their operands, once for each tile (host_device/hull.h).
#pragma once
#include "kernel_config.h"  // which has functions for attention/hulls.cuh
#include "attention/hulls.cuh"
#include "maps/map_words.cuh"

// Rows of a block and keys of a tile that a lane computes.
constexpr int kRowsOfLane = ((kBlockStrips > 0 ? kStripRows * kBlockStrips : +kBlockRows) + 31) / 32;
constexpr int kKeysOfLane = (kBlockKeys + 31) / 32;

// Stores the hulls of the row nodes of `blocks` blocks of rows, or of the key nodes of as many tiles of keys. A warp
// computes them; it loads the values of all blocks before it reduces the first. values(row or key, x) computes the
// nodes of a row or key, range(n) returns the rows or keys of the n-th block, which may be none, and to(n) the address
// of its hulls; they are not stored if it is null. A lane without a row or key of its own repeats the last one, which
// changes no hull.
template <int nodes, int of_lane, int blocks, class Values, class Range, class To>
__device__ __forceinline__ void store_hulls(const Values& values, const Range& range, const To& to) {
  if constexpr (nodes > 0) {
    const int lane = threadIdx.x % 32;
    int x[blocks][of_lane][nodes];
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      const RowRange of = range(n);
#pragma unroll
      for (int j = 0; j < of_lane; ++j) values(max(min(of.begin + 32 * j + lane, of.end - 1), 0), x[n][j]);
    }
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      NodeHull* const hulls = to(n);
#pragma unroll
      for (int i = 0; i < nodes; ++i) {
        int low = x[n][0][i], high = low;
        u64 hashes = hash_of(low);
#pragma unroll
        for (int j = 1; j < of_lane; ++j) {
          low = min(low, x[n][j][i]);
          high = max(high, x[n][j][i]);
          hashes |= hash_of(x[n][j][i]);
        }
        low = min_of_warp(low);
        high = max_of_warp(high);
        const u32 first = bits_of_warp(u32(hashes));
        const u32 second = bits_of_warp(u32(hashes >> 32));
        if (lane == 0 && hulls != nullptr) hulls[i] = {low, high, u64(second) << 32 | first};
      }
    }
  }
}

// The hulls of blocks of rows first, first + step, ... of a map, as far as they come before `end`.
template <int blocks, class Params>
__device__ __forceinline__ void store_row_hulls(const Params& p, const MapShape& of, int map, int first, int step,
                                                int end, NodeHull* to) {
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  store_hulls<kRowNodes, kRowsOfLane, blocks>(
      [&](int row, int* x) { expression_rows(expression_place(p, n, batch, head, row, 0), x); },
      [&](int i) { return rows_of_block(n, first + i * step); },
      [&](int i) { return first + i * step < end ? to + i * step * kRowNodes : nullptr; });
}

// The hulls of tiles of keys first, first + step, ... of a sequence, as far as they come before `end`.
template <int tiles, class Params>
__device__ __forceinline__ void store_key_hulls(const Params& p, int batch, int first, int step, int end,
                                                NodeHull* to) {
  const Lengths n = lengths_of(p, batch);
  store_hulls<kKeyNodes, kKeysOfLane, tiles>(
      [&](int key, int* x) { expression_keys(expression_place(p, n, batch, 0, 0, key), x); },
      [&](int i) {
        const KeyRange keys = keys_of_tile(n, first + i * step);
        return RowRange{keys.begin, keys.end};
      },
      [&](int i) { return first + i * step < end ? to + i * step * kKeyNodes : nullptr; });
}

// The state of a tile by the hulls of its block of rows and of its keys.
template <class Params>
__device__ __forceinline__ TileState tile_state(const Params& p, const MapShape& of, int map, int row_block,
                                                int key_tile, const NodeHull* rows, const NodeHull* keys) {
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  if (row_block >= of.row_blocks || key_tile >= of.key_tiles ||
      !band_shows(p, n, rows_of_block(n, row_block), key_tile))
    return {false, false};
  const Hull mask = expression_hull(expression_place(p, n, batch, head, 0, 0), rows, keys);
  return {mask.high != 0, mask.high != 0 && mask.low != 1};
}
