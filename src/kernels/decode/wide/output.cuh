// The end of a work tile of the wide path: its warps store their columns of O, and one of them the LSE of each row, or
// a partial result.
#pragma once
#include "decode/output.cuh"
#include "decode/wide/softmax.cuh"

__device__ __forceinline__ void store_work_tile(const DecodeParams& p, const WorkTile& tile, const WideWarp& warp,
                                                const WideSoftmax& softmax, const WideOutput& O) {
  const int first = warp.first_column();
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip)
    store_rows<kShareColumns>(p, tile, softmax.rows[strip], O[strip],
                              warp.first_row + strip * kWarpRows + int(thread_row()), first,
                              min(p.dv - first, int(kShareColumns)), warp.share == 0 && threadIdx.x % 4 == 0);
}
