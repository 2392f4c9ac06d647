// The end of a work tile of the wide path: its warps store the columns of O, and the LSE, or a partial result.
#pragma once
#include "decode/output.cuh"
#include "decode/wide/softmax.cuh"

__device__ __forceinline__ void store_work_tile(const DecodeParams& p, const WorkTile& tile, const WideWarp& warp,
                                                const WideSoftmax& softmax, const WideOutput& O) {
  const TileRows in_tile = rows_of_tile(p, tile);
  const bool whole = tile.splits == 1;
  const int dims = min(p.dv - warp.first_column(), int(kShareColumns));
  const bool stores_stats = warp.share == 0 && threadIdx.x % 4 == 0;  // one thread for each row
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp.first_row + strip * kWarpRows + int(thread_row()) + 8 * half;
      const bool exists = row < in_tile.count;
      const float shift = softmax.rows[strip].shift[half];
      const float sum = softmax.rows[strip].sum[half];
      if (whole) {
        const float scale = normalizer(p.sinks, head_of_row(tile, in_tile.first + row), sum, shift);
        ElementO::Memory* const out = exists ? row_of_tile<ElementO>(p, p.o, tile, in_tile.first + row)
                                             : static_cast<ElementO::Memory*>(p.o.data);
        Finite<ElementO> any;
#pragma unroll
        for (int i = 0; i < kShareColumns / 2; i += 16)
          store_global_row<ElementO, kShareColumns, !kOWhole>(out + warp.first_column(),
                                                              exists ? dims : 0, O[strip], i, half, scale, any);
        if (exists && stores_stats) store_lse(p, tile, in_tile.first + row, shift, sum);
      } else if (exists) {
        float* const partial = Schedule::partial_of(p, tile, tile.split) + row * partial_row_floats(kValueDim);
#pragma unroll
        for (int i = 2 * half; i < kShareColumns / 2; i += 4)
          if (warp.has_columns(2 * (i - 2 * half)))
            *reinterpret_cast<float2*>(partial + warp.first_column() + 2 * (i - 2 * half) + int(thread_column())) = {
                O[strip][i], O[strip][i + 1]};
        if (stores_stats) store_stats(partial, shift, sum);
      }
    }
}
