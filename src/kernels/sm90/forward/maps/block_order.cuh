// The order in which CTAs take the blocks of rows of a section. Where a map says which tiles a block sees
// (kSkipsTiles), no formula says how long it takes: each CTA sorts the last blocks of the last section by the number of
// these tiles, so that those that take longest come first. The others stay in their order, because neighbours read the
// same K and V. The consumers sort while the producer loads their first q tile.
#pragma once
#include "attention/seen_tiles.cuh"
#include "device/dependent_launch.cuh"
#include "sm90/common/work_tiles.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"

enum : int {
  kOrdersBlocks = kSkipsTiles && !kSplitTail,
};

// The index of a block of rows in a section, and the block of an index, as q_tile_of() counts them.
template <class Params>
__device__ __forceinline__ int index_in_section(const Params& p, int block) {
  return first_rows_see_most(band_of(p)) ? block : p.work.row_blocks - 1 - block;
}

// The strips of a block where a map says which tiles are visible. The call may choose the number of blocks
// (forward_schedule.cpp).
template <class Params>
__device__ __forceinline__ BlockStrips strips_of_mapped_block(const Params& p, int rows, int block) {
  return kEvenBlocks ? strips_of_even_block(p.work.row_blocks, rows, kConsumers, block)
                     : strips_of_block(rows, kConsumers, block);
}

// The blocks of the last section that are sorted: indices [begin, end) of each map, none if the section has too many.
struct SortedBlocks {
  int maps, begin, end;
  template <class Params>
  __device__ __forceinline__ explicit SortedBlocks(const Params& p)
      : maps(p.expression.map_shape.batches * p.expression.map_shape.heads), begin(0), end(p.work.row_blocks) {
    // CTAs have begun with the first blocks of the launch, in the order of their numbers.
    const int begun = int(gridDim.x) - p.work.bulk_heads * end, heads = p.work.heads - p.work.bulk_heads;
    if (begun > 0) begin = min((begun + heads - 1) / heads, end);
    begin = max(begin, end - (kSortedRounds * int(gridDim.x) + heads - 1) / heads);
    if (maps * end > kMaxSortedBlocks) begin = end;
  }
};

__device__ __forceinline__ u32 sorted_block_address(u32 smem, int i) { return smem + kLayout.order + 2 * i; }

// All consumers call this once. Stores for each map the blocks of the sorted indices.
template <class Params>
__device__ __forceinline__ void sort_blocks(const Params& p, u32 smem) {
  constexpr int kThreadsOfBlock = 4, kConsumerThreads = 128 * kConsumers;
  wait_for_earlier_kernels();  // which make the map
  const SortedBlocks of(p);
  const SeenWords& map = p.expression.map;
  const int thread = int(threadIdx.x) - 128, all = of.begin < of.end ? of.maps * of.end : 0;
#pragma unroll 1
  for (int first = 0; first < all; first += kConsumerThreads / kThreadsOfBlock) {
    const int i = first + thread / kThreadsOfBlock;
    int tiles = 0;
    if (i < all) {
      const int of_map = i / of.end, block = index_in_section(p, i - of_map * of.end);
      const int batch = of_map / p.expression.map_shape.heads;
      const int head = (of_map - batch * p.expression.map_shape.heads) * map.heads_of_map;
      const Lengths n = lengths_of(p, batch);
      const BlockStrips strips = strips_of_mapped_block(p, n.sq, block);
      const u64* const words = words_of_block(map, batch, head, strips.first);
#pragma unroll 1
      for (int at = thread % kThreadsOfBlock; at < map.block - map.has_spans(); at += kThreadsOfBlock) {
        u32 seen = 0;
#pragma unroll
        for (int strip = 0; strip < kConsumers; ++strip)
          if (strip < strips.end - strips.first && kStripRows * (strips.first + strip) < n.sq)
            seen |= u32(words[strip * map.block + at]);
        tiles += __popc(seen);
      }
    }
#pragma unroll
    for (int other = 1; other < kThreadsOfBlock; other *= 2) tiles += __shfl_xor_sync(0xffffffff, tiles, other);
    if (i < all && thread % kThreadsOfBlock == 0) store_shared_u16(sorted_block_address(smem, i), min(tiles, 0xffff));
  }
  named_barrier_sync(kBarrierAllConsumers, kConsumerThreads);
  const int of_map = thread / of.end, index = thread - of_map * of.end, first = of_map * of.end;
  const bool sorted = thread < all && index >= of.begin;
  int rank = of.begin;
  if (sorted) {
    const u32 tiles = load_shared_u16(sorted_block_address(smem, thread));
#pragma unroll 4
    for (int i = of.begin; i < of.end; ++i) {
      const u32 others = load_shared_u16(sorted_block_address(smem, first + i));
      rank += others > tiles || (others == tiles && i < index);
    }
  }
  named_barrier_sync(kBarrierAllConsumers, kConsumerThreads);
  if (sorted) store_shared_u16(sorted_block_address(smem, first + rank), u32(index_in_section(p, index)));
  mbarrier_arrive(smem + kLayout.ordered);
}

// The q tile of a number that is not a CTA's first one.
template <class Params>
__device__ __forceinline__ QTile sorted_q_tile_of(const Params& p, u32 smem, int number) {
  QTile tile = q_tile_of(p, number);
  if constexpr (kOrdersBlocks) {
    const SortedBlocks of(p);
    mbarrier_wait(smem + kLayout.ordered, 0);
    if (tile.block < 0 || number < p.work.bulk_heads * of.end) return tile;
    const int index = index_in_section(p, tile.block);
    const SeenWords& map = p.expression.map;
    const int of_map = (map.batch == 0 ? 0 : tile.batch * p.expression.map_shape.heads) +
                       (map.head == 0 ? 0 : tile.head / map.heads_of_map);
    if (index >= of.begin) tile.block = int(load_shared_u16(sorted_block_address(smem, of_map * of.end + index)));
  }
  return tile;
}
