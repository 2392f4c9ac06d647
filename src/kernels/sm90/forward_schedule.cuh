// Which rows and keys a block, and each of its warpgroups, works on.
#pragma once
#include "sm90/forward_layout.cuh"
#include "sm90/forward_params.h"
#include "shared/misc.cuh"

struct Tile {
  int block, head, batch, part;  // block of up to Br rows, < 0: no more work; part of a split tile, < 0: not split
  int split;                     // which split tile
};

struct Lengths {
  int q_start, k_start, sq, sk;
};

__device__ __forceinline__ Lengths lengths_of(const ForwardParams& p, int batch) {
  Lengths n = {0, 0, p.sq, p.sk};
  if (kPacked) {
    n.q_start = p.cu_seqlens_q[batch];
    n.k_start = p.cu_seqlens_k[batch];
    n.sq = p.cu_seqlens_q[batch + 1] - n.q_start;
    n.sk = p.cu_seqlens_k[batch + 1] - n.k_start;
  }
  if (kSeqUsedK) n.sk = min(n.sk, p.seqused_k[batch]);
  return n;
}

__device__ __forceinline__ Tile tile_of(const ForwardParams& p, int item) {
  if (item >= p.items) return {-1, 0, 0, 0, 0};
  Tile tile;
  tile.part = -1, tile.split = 0;
  if (kSplitTail && item >= p.first_split_tile) {
    const int rest = item - p.first_split_tile;
    tile.part = rest % p.split_parts, tile.split = rest / p.split_parts;
    item = p.first_split_tile + tile.split;
  }
  const bool last = item >= p.bulk_heads * p.row_tiles;
  const int section_heads = last ? p.heads - p.bulk_heads : p.section_heads;
  const int first_head = last ? p.bulk_heads : item / (section_heads * p.row_tiles) * section_heads;
  const int rest = item - first_head * p.row_tiles;
  const int head = first_head + rest % section_heads;
  tile.block = p.row_tiles - 1 - rest / section_heads;  // longest first
  tile.head = head % p.hq;
  tile.batch = head / p.hq;
  return tile;
}

// The rows of a sequence are cut into strips of 64, one for each warpgroup of a block. Where they do not come out even, blocks at the beginning
// have one less: under a band their tiles are the shortest.
__device__ __forceinline__ int first_strip(const Lengths& n, int block) {
  const int strips = (n.sq + 63) / 64, missing = (kConsumers - strips % kConsumers) % kConsumers;
  return kConsumers * block - min(block, missing);
}

// Keys [begin, end) that a row may see; none when begin >= end.
struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ KeyRange visible_keys(const ForwardParams& p, const Lengths& n, int row) {
  const int diagonal = row + n.sk - n.sq;
  return {kHasLeft ? max(0, diagonal - p.window_left) : 0, kHasRight ? min(n.sk, diagonal + p.window_right + 1) : n.sk};
}

// Key tiles [begin, end) that rows [first, last] may see.
struct KeyTiles {
  int begin, end;
};

__device__ __forceinline__ KeyTiles key_tiles(const ForwardParams& p, const Lengths& n, int first, int last) {
  const int key_begin = visible_keys(p, n, first).begin, key_end = visible_keys(p, n, last).end;
  if (first >= n.sq || key_end <= key_begin) return {0, 0};
  return {key_begin / kBlockKeys, (key_end + kBlockKeys - 1) / kBlockKeys};
}

// The key tiles that a tile loads, or one part of it.
__device__ __forceinline__ KeyTiles block_key_tiles(const ForwardParams& p, const Lengths& n, const Tile& tile) {
  KeyTiles keys = key_tiles(p, n, 64 * first_strip(n, tile.block), min(64 * first_strip(n, tile.block + 1), n.sq) - 1);
  if (kSplitTail && tile.part >= 0) {
    const int count = keys.end - keys.begin;
    keys.end = keys.begin + count * (tile.part + 1) / p.split_parts;
    keys.begin += count * tile.part / p.split_parts;
  }
  return keys;
}

// Where the 64 rows of a warpgroup lie.
struct Place {
  int row, head, batch, part;  // the first row in its sequence; part of a split tile, < 0: not split
  int split;                   // which split tile
};

// What one warpgroup must know about its 64 rows of a tile. The producer computes it, and the consumers keep little of it in registers: the
// main loop has none to spare. One lane writes it and one lane of each warp reads it, those that arrive at the barriers of Q.
struct View {
  int first, last;  // key tiles these rows see: from `first` down to `last`; none when first < last
  int skip_front;   // tiles before `first` that only other warpgroups see; < 0: no more work
  int skip_back;    // and after `last`
  int clear_begin, clear_end;  // tiles in [clear_begin, clear_end) are visible to all rows
  int sk;
  int diagonal;  // key index on the diagonal of the first row
  Place place;   // part and split in one word
};

__device__ __forceinline__ u32 view_address(u32 smem, u32 stage, u32 group) { return smem + sView + 48 * (stage * kConsumers + group); }

__device__ __forceinline__ void write_view(const ForwardParams& p, const Tile& tile, const Lengths& n, const KeyTiles& block, u32 address, int row) {
  KeyTiles keys = key_tiles(p, n, row, min(row + 64, n.sq) - 1);
  keys.end = min(keys.end, block.end);
  keys.begin = max(keys.begin, block.begin);
  if (tile.block < 0 || keys.end <= keys.begin) keys.begin = keys.end = block.begin;
  const int diagonal = row + n.sk - n.sq;
  int clear_end = n.sk;
  if (kHasRight) clear_end = min(clear_end, diagonal + p.window_right + 1);
  clear_end = max(clear_end, 0) / kBlockKeys;
  const int clear_begin = kHasLeft ? (max(0, diagonal + 63 - p.window_left) + kBlockKeys - 1) / kBlockKeys : 0;
  shared_store4(address, keys.end - 1, keys.begin, tile.block < 0 ? -1 : block.end - keys.end, keys.begin - block.begin);
  shared_store4(address + 16, clear_begin, clear_end, n.sk, diagonal);
  shared_store4(address + 32, row, tile.head, tile.batch, tile.part < 0 ? -1 : tile.split * 8 + tile.part);
}

__device__ __forceinline__ Place read_place(u32 view) {
  Place place;
  shared_load4_uniform(view + 32, place.row, place.head, place.batch, place.part);
  place.split = place.part >> 3;
  if (place.part >= 0) place.part &= 7;
  return place;
}
