// Which rows and keys an item is, and each strip of it.
#pragma once
#include "plan.h"
#include "shared/attention_params.h"
#include "shared/memory.cuh"
#include "shared/strips.h"

__device__ __forceinline__ Item item_of(const AttentionParams& p, int number) {
  return item_of(p.work, p.hq, kSplitTail, true, number);
}

__device__ __forceinline__ Lengths lengths_of(const AttentionParams& p, int batch) {
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

__device__ __forceinline__ Band band_of(const AttentionParams& p) {
  return {bool(kHasLeft), bool(kHasRight), p.window_left, p.window_right};
}

// The key tiles of an item.
__device__ __forceinline__ KeyTiles item_key_tiles(const AttentionParams& p, const Lengths& n, const Item& item) {
  const int begin = kStripRows * first_strip(n.sq, kConsumers, item.block);
  const int end = min(kStripRows * first_strip(n.sq, kConsumers, item.block + 1), n.sq);
  const KeyTiles keys = key_tiles(band_of(p), n, kBlockKeys, begin, end - 1);
  return kSplitTail && item.part >= 0 ? tiles_of_part(p.work, keys, item.part) : keys;
}

// The key tiles of a strip, from right to left.
struct StripKeys {
  int first, last;             // those its rows see: from `first` down to `last`; none when first < last
  int skip_front;              // tiles of the item before `first`, which only other strips see; < 0: no more work
  int skip_back;               // and after `last`
  int clear_begin, clear_end;  // tiles in [clear_begin, clear_end) are visible to all rows
  int sk;
  int diagonal;  // of the first row
};

// Where a strip lies.
struct Place {
  int row;  // its first, in its sequence
  int head, batch;
  int part;  // as in Item
};

// What a consumer warpgroup must know of its strip of an item. The producer computes it, and the consumers keep little
// of it in registers: the main loop has none to spare. One lane writes it and one lane of each warp reads it, those
// that arrive at the barriers of Q.
struct View {
  StripKeys keys;
  Place place;
};

// What of a view the end of an item needs, from shared memory.
__device__ __forceinline__ Place load_place(u32 view) {
  return load_shared_struct_uniform<Place>(view + sizeof(StripKeys));
}

__device__ __forceinline__ View view_of(const AttentionParams& p, const Item& item, const Lengths& n,
                                        const KeyTiles& block, int row) {
  KeyTiles mine = key_tiles(band_of(p), n, kBlockKeys, row, min(row + kStripRows, n.sq) - 1);
  mine.end = min(mine.end, block.end);
  mine.begin = max(mine.begin, block.begin);
  if (item.block < 0 || mine.end <= mine.begin) mine.begin = mine.end = block.begin;
  const int diagonal = diagonal_of(n, row);
  int clear_end = n.sk;
  if (kHasRight) clear_end = min(clear_end, diagonal + p.window_right + 1);
  clear_end = max(clear_end, 0) / kBlockKeys;
  const int clear_begin =
      kHasLeft ? (max(0, diagonal + kStripRows - 1 - p.window_left) + kBlockKeys - 1) / kBlockKeys : 0;
  const int skip_front = item.block < 0 ? -1 : block.end - mine.end;
  return {{mine.end - 1, mine.begin, skip_front, mine.begin - block.begin, clear_begin, clear_end, n.sk, diagonal},
          {row, item.head, item.batch, item.part}};
}
