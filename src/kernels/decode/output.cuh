// The end of a work tile: combines the results of its warp groups, and stores O and LSE, or a partial result.
#pragma once
#include "kernel_config.h"  // before host_device/expression.h, which looks for FULGUR_EXPRESSIONS
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "decode/schedule/schedule.cuh"

// Stores four columns of a row of O. `scale` is one over the sum of the row.
__device__ __forceinline__ void store_columns(const DecodeParams& p, ElementO::Memory* row, int column,
                                              const float4& x, float scale) {
  if constexpr (ElementO::kType == kF32) {
    const float4 y = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    if (kOWhole && column + 4 <= p.dv) {
      *reinterpret_cast<float4*>(row + column) = y;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < p.dv) row[column + i] = i == 0 ? y.x : i == 1 ? y.y : i == 2 ? y.z : y.w;
  } else {
    const u32 low = ElementO::pack(x.x * scale, x.y * scale);
    const u32 high = ElementO::pack(x.z * scale, x.w * scale);
    if (kOWhole && column + 4 <= p.dv) {
      *reinterpret_cast<uint2*>(row + column) = {low, high};
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < p.dv) row[column + i] = static_cast<ElementO::Memory>((i < 2 ? low : high) >> (i % 2 * 16));
  }
}

// The q head of a row of a work tile.
__device__ __forceinline__ int head_of_row(const WorkTile& tile, int row) {
  return tile.head * kGroup + row % kGroup;
}

__device__ __forceinline__ void store_lse(const DecodeParams& p, const WorkTile& tile, int row, float shift,
                                          float sum) {
  if (!kHasLse) return;
  const int head = head_of_row(tile, row);
  float* lse = p.lse + tile.batch * p.lse_batch_stride + head * p.lse_head_stride;
  lse[tile.sequence.n.q_start + row / kGroup] = lse_of(p.sinks, head, sum, shift);
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float factor) {
  sum.x += factor * x.x;
  sum.y += factor * x.y;
  sum.z += factor * x.z;
  sum.w += factor * x.w;
}

// Stores the shift and the sum of a row of a partial result, after its O.
__device__ __forceinline__ void store_stats(float* row, float shift, float sum) {
  *reinterpret_cast<float2*>(row + kValueDim) = {shift, sum};
}

// The factor that makes a sum and O relative to `new_shift` of those relative to `shift`.
__device__ __forceinline__ float factor_of(float shift, float new_shift) {
  return shift == infinity() ? 0 : exp2_fast(new_shift - shift);
}

// Stores two rows of a thread of a work tile, `first_row` and the one 8 rows on: `columns` columns from `first` on, of
// which `dims` exist in O; or those of a partial result. `stores_stats`: with the LSE, or the shift and the sum.
template <int columns>
__device__ __forceinline__ void store_rows(const DecodeParams& p, const WorkTile& tile, const Rows& rows,
                                           const float (&O)[columns / 2], int first_row, int first, int dims,
                                           bool stores_stats) {
  const TileRows in_tile = rows_of_tile(p, tile);
  const bool whole = tile.splits == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    const bool exists = row < in_tile.count;
    const float shift = rows.shift[half];
    const float sum = rows.sum[half];
    if (whole) {
      const float scale = normalizer(p.sinks, head_of_row(tile, in_tile.first + row), sum, shift);
      ElementO::Memory* const out = exists ? row_of_tile<ElementO>(p, p.o, tile, in_tile.first + row)
                                           : static_cast<ElementO::Memory*>(p.o.data);
      Finite<ElementO> any;
#pragma unroll
      for (int i = 0; i < columns / 2; i += 16)
        store_global_row<ElementO, columns, !kOWhole>(out + first, exists ? dims : 0, O, i, half, scale, any);
      if (exists && stores_stats) store_lse(p, tile, in_tile.first + row, shift, sum);
    } else if (exists) {
      float* const partial = Schedule::partial_of(p, tile, tile.split) + row * partial_row_floats(kValueDim);
#pragma unroll
      for (int i = 2 * half; i < columns / 2; i += 4) {
        const int column = first + 2 * (i - 2 * half);
        if (columns < kValueDim && column >= kValueDim) break;
        *reinterpret_cast<float2*>(partial + column + int(thread_column())) = {O[i], O[i + 1]};
      }
      if (stores_stats) store_stats(partial, shift, sum);
    }
  }
}

// Stores a work tile of a CTA with one warp group: O, or a partial result.
__device__ __forceinline__ void store_warp_group(const DecodeParams& p, const WorkTile& tile, const Rows& rows,
                                                 const float (&O)[kWarpColumns / 2]) {
  const int first = first_column_of_warp();
  store_rows<kWarpColumns>(p, tile, rows, O, threadIdx.x / 32 % kWarpsPerGroup * kWarpRows + int(thread_row()), first,
                           p.dv - first, first == 0 && threadIdx.x % 4 == 0);
}

enum : int { kExchangeColumns = exchange_columns(kTile), kExchangeStride = exchange_stride(kTile) };

// The result of a warp for combine_warp_groups: O and the statistics of its rows. `first_row` is the warp's first row
// in what the warp groups exchange.
struct WarpResult {
  const Rows& rows;
  const float (&O)[kValueDim / 2];

  static __device__ __forceinline__ bool has_row(int half) {
    return kTileRows >= kWarpRows || int(thread_row()) + 8 * half < kTileRows;
  }
  __device__ __forceinline__ void put_stats(float2* stats, int first_row) const {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (has_row(i)) stats[first_row + thread_row() + 8 * i] = {rows.shift[i], rows.sum[i]};
  }
  // Puts kExchangeColumns columns, from the constant `first` on.
  __device__ __forceinline__ void put_columns(float* columns, int first_row, int first) const {
#pragma unroll
    for (int i = 0; i < kExchangeColumns / 2 && first / 2 + i < kValueDim / 2; i += 2) {
      const int row = first_row + thread_row() + (i & 2 ? 8 : 0);
      if (!has_row(i >> 1 & 1)) continue;
      *reinterpret_cast<float2*>(columns + row * kExchangeStride + i / 4 * 8 + int(thread_column())) = {
          O[first / 2 + i], O[first / 2 + i + 1]};
    }
  }
};

// Combines the results of the warp groups through shared memory, in the order of the warp groups, and stores O or a
// partial result.
template <class Result>
__device__ __forceinline__ void combine_warp_groups(const DecodeParams& p, const WorkTile& tile,
                                                    const Result& result) {
  const TileRows in_tile = rows_of_tile(p, tile);
  const bool whole = tile.splits == 1;
  // With kHeads the result itself adds the first row of its warp.
  const int warp_row_offset = kHeads > 1 ? 0 : threadIdx.x / 32 % kWarpsPerGroup * kWarpRows;
  const int first_row = threadIdx.x / 32 / kWarpsPerGroup * kTileRows + warp_row_offset;
  float* const partial = whole ? nullptr : Schedule::partial_of(p, tile, tile.split);
  float2* const stats = reinterpret_cast<float2*>(raw + kLayout.stats);
  float2* const totals = reinterpret_cast<float2*>(raw + kLayout.totals);
  float* const columns = reinterpret_cast<float*>(raw + kLayout.exchange);
  result.put_stats(stats, first_row);
  sync_compute_warps();
  for (int row = threadIdx.x; row < in_tile.count; row += kComputeThreads) {
    float shift = infinity();
    float sum = 0;
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group)
      shift = fminf(shift, stats[warp_group * kTileRows + row].x);
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group) {
      float2& group_stats = stats[warp_group * kTileRows + row];
      group_stats.x = factor_of(group_stats.x, shift);
      sum += group_stats.x * group_stats.y;
    }
    totals[row] = {shift, sum};
    if (whole)
      store_lse(p, tile, in_tile.first + row, shift, sum);
    else
      store_stats(partial + row * partial_row_floats(kValueDim), shift, sum);
  }
#pragma unroll
  for (int first = 0; first < kValueDim; first += kExchangeColumns) {
    result.put_columns(columns, first_row, first);
    sync_compute_warps();
    constexpr int kFours = kExchangeColumns / 4;
#pragma unroll 1
    for (int at = threadIdx.x; at < in_tile.count * kFours; at += kComputeThreads) {
      const int row = at / kFours;
      const int column = at % kFours * 4;
      if (first + column >= kValueDim) continue;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group) {
        const float factor = stats[warp_group * kTileRows + row].x;
        const float* const from = columns + (warp_group * kTileRows + row) * kExchangeStride + column;
        add_scaled(sum, *reinterpret_cast<const float4*>(from), factor);
      }
      if (whole)
        store_columns(p, row_of_tile<ElementO>(p, p.o, tile, in_tile.first + row), first + column, sum,
                      normalizer(p.sinks, head_of_row(tile, in_tile.first + row), totals[row].y, totals[row].x));
      else
        *reinterpret_cast<float4*>(partial + row * partial_row_floats(kValueDim) + first + column) = sum;
    }
    sync_compute_warps();
  }
}
