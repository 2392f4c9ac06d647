// The mask of a work tile where scores are transposed (attention/fragment.cuh).
#pragma once
#include "decode/codes/steps.cuh"
#include "decode/scores.cuh"

struct TransposedMask : WorkTileMask {
  ThreadRows tiles[kRowTiles];  // of a thread, two rows in each of eight

  __device__ __forceinline__ TransposedMask(const DecodeParams& p, const WorkTile& tile, int warp_in_group)
      : WorkTileMask(p, tile) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      tiles[i] = rows_of_thread(p, tile, kRowsOfWarp * warp_in_group + 8 * i + int(thread_column()), 1);
  }
};
