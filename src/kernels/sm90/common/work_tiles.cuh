// The q tiles of a forward call, from the arguments of its kernel, and their places in a View. If the heads of a group
// share blocks (kSharesBlocks), the head of a q tile is the first of them.
#pragma once
#include "device/schedule.cuh"

__device__ __forceinline__ QTile q_tile_of(const AttentionParams& p, int number) {
  if (!kSharesBlocks) return q_tile_of(p.work, p.hq, kSplitTail, band_of(p), number);
  QTile tile = q_tile_of(p.work, p.hq / p.group, kSplitTail, band_of(p), number);
  tile.head *= p.group;
  return tile;
}

// The part of a View in shared memory that the end of a q tile needs.
__device__ __forceinline__ Place load_place(u32 view) {
  return load_shared_struct_uniform<Place>(view + sizeof(KeyWalk));
}
