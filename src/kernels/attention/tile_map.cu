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

// The span of a block's words; kNoSpan: of none.
struct Span {
  int begin, end;
  __device__ __forceinline__ void add(u32 seen, int word) {
    if (seen == 0) return;
    begin = min(begin, 32 * word + __ffs(int(seen)) - 1);
    end = max(end, 32 * word + 32 - __clz(int(seen)));
  }
  __device__ __forceinline__ void add(const Span& other) {
    begin = min(begin, other.begin);
    end = max(end, other.end);
  }
  __device__ __forceinline__ u64 word() const { return u64(u32(end)) << 32 | u32(begin); }
};
constexpr Span kNoSpan = {0x7fffffff, 0};

// A CTA takes a block, a warp a word, a lane a tile.
extern "C" __global__ void __launch_bounds__(128) fulgur_tile_map(const __grid_constant__ TileMapParams p) {
  wait_for_earlier_kernels();
  const MapShape& of = p.shape;
  const int blocks = kMapByKeys ? of.key_tiles : of.row_blocks;
  const int tiles = kMapByKeys ? of.row_blocks : of.key_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int map = int(blockIdx.x) / blocks, block = int(blockIdx.x) % blocks;
  const bool has_span = block_words(tiles) > map_words(tiles);
  u64* const words = p.words + (long long)(blockIdx.x) * block_words(tiles) + has_span;
  Span span = kNoSpan;
#pragma unroll 1
  for (int at = warp; at < map_words(tiles); at += 4) {
    const int tile = 32 * at + lane;
    const TileState is = tile_state(p, map, kMapByKeys ? tile : block, kMapByKeys ? block : tile);
    const u32 seen = __ballot_sync(0xffffffff, is.seen);
    const u64 partial = __ballot_sync(0xffffffff, is.partial);
    if (lane == 0) words[at] = partial << 32 | seen;
    span.add(seen, at);
  }
  if (!has_span) return;
  __shared__ Span spans[4];
  if (lane == 0) spans[warp] = span;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const Span& other : spans) span.add(other);
  words[-1] = span.word();
}

// The words of blocks of rows from those of tiles of keys, kMapByKeys. A CTA takes 32 blocks of rows, a warp a word of
// 32 tiles of keys of these; a lane has a tile, then a block.
extern "C" __global__ void __launch_bounds__(128) fulgur_map_of_rows(const __grid_constant__ TileMapParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const MapShape& of = p.shape;
  const int row_words = map_words(of.row_blocks), key_words = map_words(of.key_tiles);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int map = int(blockIdx.x) / row_words, rows = int(blockIdx.x) % row_words;
  const bool has_span = block_words(of.key_tiles) > key_words;
  const u64* const from = p.words + (long long)(map) * of.key_tiles * block_words(of.row_blocks) +
                          (block_words(of.row_blocks) - row_words) + rows;
  const int block = 32 * rows + lane;
  u64* const to = p.words_of_rows + ((long long)(map) * of.row_blocks + block) * block_words(of.key_tiles) + has_span;
  Span span = kNoSpan;
#pragma unroll 1
  for (int keys = warp; keys < key_words; keys += 4) {
    const int tile = 32 * keys + lane;
    const u64 mine = tile < of.key_tiles ? from[(long long)(tile) * block_words(of.row_blocks)] : 0;
    u64 word = 0;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const u64 seen = __ballot_sync(0xffffffff, mine >> row & 1);
      const u64 partial = __ballot_sync(0xffffffff, mine >> (32 + row) & 1);
      if (lane == row) word = partial << 32 | seen;
    }
    if (block < of.row_blocks) to[keys] = word;
    span.add(u32(word), keys);
  }
  if (!has_span) return;
  __shared__ Span spans[4][32];
  spans[warp][lane] = span;
  __syncthreads();
  if (warp > 0 || block >= of.row_blocks) return;
  for (int i = 1; i < 4; ++i) span.add(spans[i][lane]);
  to[-1] = span.word();
}
