// decode/non_finite.cuh for a chunk of V, whose rows and columns several warps share.
#pragma once
#include "decode/non_finite.cuh"
#include "decode/wide/softmax.cuh"

// Keeps NaN and infinity of V in a chunk of a tile that the mask cuts away from the rows that do not see their keys.
// All threads call it. `first_key`: of the chunk; `key`: the same in its tile.
__device__ __forceinline__ void keep_hidden_non_finite(const DecodeParams& p, WideOutput& O, const WideWarp& warp,
                                                       const WorkTileMask& mask, const ThreadRows (&rows)[kWarpStrips],
                                                       u32 v, int first_key, int key, int sk) {
  const bool found = finds_hidden_non_finite<kVChunkPanelBytes>(v, first_key, kVChunkKeys, mask.seen_by_all, sk,
                                                                threadIdx.x, kComputeThreads);
  if (!__syncthreads_or(found)) return;
#pragma unroll 1
  for (int i = 0; i < kVChunkKeys; ++i) {
    // Read anew, so that the compiler keeps no addresses.
    const int first_column = warp.first_column() + int(lane_of_warp()) % 4 * 2;
    bool seen[kWarpStrips][2];
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp.first_row + strip * kWarpRows + int(thread_row()) + 8 * half;
        const bool hidden = kScoreMod ? (load_shared_u16(WideSoftmax::place(row, key + i)) & 0x8000) != 0
                                      : hides(p, rows[strip].context(half, first_key + i));
        seen[strip][half] = rows[strip].keys.sees(half, first_key + i) && !hidden;
      }
#pragma unroll
    for (int column = 0; column < kShareColumns; column += 8) {
      if (!warp.has_columns(column)) break;
      float x[2];
      load_not_finite(word_place<kVChunkPanelBytes>(v, i, (first_column + column) / 2), x);
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (seen[strip][j / 2]) O[strip][column / 2 + j] += x[j % 2];
    }
  }
  __syncthreads();
  replace_non_finite<kVChunkPanelBytes>(v, kVChunkKeys, threadIdx.x, kComputeThreads);
  __syncthreads();
}
