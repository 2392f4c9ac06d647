// The q tiles of a forward call, from the arguments of its kernel, and what a view says of one.
#pragma once
#include "device/schedule.cuh"

__device__ __forceinline__ QTile q_tile_of(const AttentionParams& p, int number) {
  return q_tile_of(p.work, p.hq, kSplitTail, band_of(p), number);
}

// What of a view the end of a q tile needs, from shared memory.
__device__ __forceinline__ Place load_place(u32 view) {
  return load_shared_struct_uniform<Place>(view + sizeof(KeyWalk));
}
