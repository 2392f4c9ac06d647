// The words of a map of tiles (host_device/tile_map.h), made of the states of its tiles, whichever mask decides them.
#pragma once
#include "attention/mask.cuh"
#include "device/dependent_launch.cuh"
#include "host_device/tile_map.h"

// The rows of a block in their sequence; maybe none.
__device__ __forceinline__ RowRange rows_of_block(const Lengths& n, int block) {
  if constexpr (kBlockStrips > 0)
    return {kStripRows * first_strip(n.sq, kBlockStrips, block),
            min(kStripRows * first_strip(n.sq, kBlockStrips, block + 1), n.sq)};
  else
    return {kBlockRows * block, min(kBlockRows * (block + 1), n.sq)};
}

// The keys of a tile in their sequence; maybe none.
__device__ __forceinline__ KeyRange keys_of_tile(const Lengths& n, int tile) {
  return {kBlockKeys * tile, min(kBlockKeys * (tile + 1), n.sk)};
}

// Whether some row of a block sees some key of a tile by the bounds of the call alone.
template <class Params>
__device__ __forceinline__ bool band_shows(const Params& p, const Lengths& n, const RowRange& rows, int key_tile) {
  if (rows.begin >= rows.end) return false;
  const KeyTiles seen = key_tiles(band_of(p), n, kBlockKeys, rows.begin, rows.end - 1);
  return key_tile >= seen.begin && key_tile < seen.end;
}

struct TileState {
  bool seen, partial;
};

// The word of 32 tiles, of which each lane of a warp has one.
__device__ __forceinline__ u64 map_word(int seen, int partial) {
  const u64 low = __ballot_sync(0xffffffff, seen);
  const u64 high = __ballot_sync(0xffffffff, partial);
  return high << 32 | low;
}

// The span of a block: its tiles [begin, end), outside of which none is seen.
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

// Stores the words of a map: a CTA computes a block, a warp a word, a lane a tile. state(map, row block, key tile)
// returns the TileState of a tile; `map` counts the maps of sequences and heads.
template <class State>
__device__ __forceinline__ void map_tiles(const TileMapParams& p, const State& state) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
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
    const TileState is = state(map, kMapByKeys ? tile : block, kMapByKeys ? block : tile);
    const u64 word = map_word(is.seen, is.partial);
    if (lane == 0) words[at] = word;
    span.add(u32(word), at);
  }
  if (!has_span) return;
  __shared__ Span spans[4];
  if (lane == 0) spans[warp] = span;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const Span& other : spans) span.add(other);
  words[-1] = span.word();
}

// Stores the words of a map by rows, which are those of a map by keys transposed. A CTA computes 32 blocks of rows, a
// warp their words of 32 tiles of keys: a lane first has the word of a tile of keys, then that of a block of rows.
__device__ __forceinline__ void map_rows(const TileMapParams& p) {
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
      const u64 of_row = map_word(int(mine >> row & 1), int(mine >> (32 + row) & 1));
      if (lane == row) word = of_row;
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
