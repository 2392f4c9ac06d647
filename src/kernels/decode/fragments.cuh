// Partial results by fragments: warpgroups store O in the order in which their threads hold it, and decode/combine.cu
// reads it in that order.
#pragma once
#include "decode/output.cuh"

// A partial result by fragments (Schedule::kFragments) has all rows of a block: O as the threads hold it, four floats
// of each thread side by side, then {shift, sum} of each row.
__device__ __forceinline__ float* fragment_of(float* partial, int warp_in_group, int eight) {
  return partial + 4 * ((warp_in_group * (kValueDim / 8) + eight) * 32 + int(threadIdx.x % 32));
}
__device__ __forceinline__ float* fragment_stats(float* partial, int row) {
  return partial + kBlockRows * kValueDim + 2 * row;
}

// Stores the partial result of the only work tile of a CTA. The second warp group, if it had a tile of keys, passes its
// O to the first one through shared memory, in place of its own K and V.
static_assert(!Schedule::kFragments || kWarpGroups == 1 ||
              (kWarpGroups == 2 && kLayout.k_full >= int(kBlockRows) * (kValueDim + 2) * 4));
__device__ __forceinline__ void store_fragments(const DecodeParams& p, const WorkTile& tile, Rows& rows,
                                            float (&O)[kWarpColumns / 2]) {
  const int warp_group = kWarpGroups > 1 ? threadIdx.x / kWarpGroupThreads : 0;
  const int first_column = first_column_of_warp();
  const int warp_in_group = threadIdx.x / 32 % kWarpsPerGroup;
  const int row = warp_in_group * kWarpRows + int(thread_row());
  if (kWarpGroups > 1 && tile.begin + 1 < tile.end) {
    float* const second = reinterpret_cast<float*>(raw + kLayout.group_bytes);
    if (warp_group == 1) {
      sync_warp_group(1);
#pragma unroll
      for (int i = 0; i < kWarpColumns / 8; ++i)
        *reinterpret_cast<float4*>(fragment_of(second, warp_in_group, i)) = {O[4 * i], O[4 * i + 1], O[4 * i + 2],
                                                                           O[4 * i + 3]};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (threadIdx.x % 4 == 0)
          *reinterpret_cast<float2*>(fragment_stats(second, row + 8 * i)) = {rows.shift[i], rows.sum[i]};
    }
    sync_compute_warps();
    if (warp_group == 0) {
      float mine[2], others[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 other_stats = *reinterpret_cast<const float2*>(fragment_stats(second, row + 8 * i));
        const float shift = fminf(rows.shift[i], other_stats.x);
        mine[i] = factor_of(rows.shift[i], shift);
        others[i] = factor_of(other_stats.x, shift);
        rows.shift[i] = shift;
        rows.sum[i] = mine[i] * rows.sum[i] + others[i] * other_stats.y;
      }
#pragma unroll
      for (int i = 0; i < kWarpColumns / 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(fragment_of(second, warp_in_group, i));
        O[4 * i] = mine[0] * O[4 * i] + others[0] * x.x;
        O[4 * i + 1] = mine[0] * O[4 * i + 1] + others[0] * x.y;
        O[4 * i + 2] = mine[1] * O[4 * i + 2] + others[1] * x.z;
        O[4 * i + 3] = mine[1] * O[4 * i + 3] + others[1] * x.w;
      }
    }
  }
  if (warp_group != 0 || warp_in_group * kWarpRows >= rows_of_tile(p, tile).count) return;
  float* const partial = Schedule::partial_of(p, tile, tile.split);
#pragma unroll
  for (int i = 0; i < kWarpColumns / 8; ++i)
    *reinterpret_cast<float4*>(fragment_of(partial, warp_in_group, first_column / 8 + i)) =
        float4{O[4 * i], O[4 * i + 1], O[4 * i + 2], O[4 * i + 3]};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (first_column == 0 && threadIdx.x % 4 == 0)
      *reinterpret_cast<float2*>(fragment_stats(partial, row + 8 * i)) = {rows.shift[i], rows.sum[i]};
}

// Stores two columns of a row of O.
__device__ __forceinline__ void store_pair(const DecodeParams& p, ElementO::Memory* row, int column, u32 pair) {
  if (kOWhole && column + 2 <= p.dv) {
    *reinterpret_cast<u32*>(row + column) = pair;
    return;
  }
  if (column < p.dv) row[column] = static_cast<ElementO::Memory>(pair);
  if (column + 1 < p.dv) row[column + 1] = static_cast<ElementO::Memory>(pair >> 16);
}

// Combines `count` splits of a q block, in the order of their keys, to O and LSE. A warp combines kCombineEights times
// eight columns, from block `first_eight` of eight on, of the rows that warp `warp_in_group` of each CTA stored.
__device__ __forceinline__ void combine_fragments(const DecodeParams& p, const WorkTile& tile, int count,
                                                  int warp_in_group, int first_eight) {
  constexpr int kAtOnce = 16 / kCombineEights;  // splits whose loads are in flight together
  const auto exists = [&](int i) { return kValueDim / 8 % kCombineEights == 0 || first_eight + i < kValueDim / 8; };
  const int row = warp_in_group * kWarpRows + int(thread_row());
  float x[kCombineEights][4];
#pragma unroll
  for (int i = 0; i < kCombineEights; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
  float shift[2] = {infinity(), infinity()};
  float sum[2] = {0, 0};
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float4 y[kAtOnce][kCombineEights];
    float2 stats[2][kAtOnce];
#pragma unroll
    for (int split = 0; split < kAtOnce; ++split) {
      stats[0][split] = stats[1][split] = {infinity(), 0};
#pragma unroll
      for (int i = 0; i < kCombineEights; ++i) y[split][i] = {0, 0, 0, 0};
      if (first + split >= count) continue;
      float* const partial = Schedule::partial_of(p, tile, first + split);
#pragma unroll
      for (int i = 0; i < kCombineEights; ++i)
        if (exists(i)) y[split][i] = load_global_fresh4(fragment_of(partial, warp_in_group, first_eight + i));
      stats[0][split] = load_global_fresh2(fragment_stats(partial, row));
      stats[1][split] = load_global_fresh2(fragment_stats(partial, row + 8));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float next = shift[half];
#pragma unroll
      for (int split = 0; split < kAtOnce; ++split) next = fminf(next, stats[half][split].x);
      const float before = factor_of(shift[half], next);
      shift[half] = next;
      sum[half] *= before;
#pragma unroll
      for (int i = 0; i < kCombineEights; ++i) {
        x[i][2 * half] *= before;
        x[i][2 * half + 1] *= before;
      }
#pragma unroll
      for (int split = 0; split < kAtOnce; ++split) {
        const float weight = factor_of(stats[half][split].x, next);
        sum[half] += weight * stats[half][split].y;
#pragma unroll
        for (int i = 0; i < kCombineEights; ++i) {
          x[i][2 * half] += weight * (half == 0 ? y[split][i].x : y[split][i].z);
          x[i][2 * half + 1] += weight * (half == 0 ? y[split][i].y : y[split][i].w);
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TileRows in_tile = rows_of_tile(p, tile);
    if (row + 8 * half >= in_tile.count) continue;
    const int at = in_tile.first + row + 8 * half;
    const float scale = normalizer(p.sinks, head_of_row(tile, at), sum[half], shift[half]);
    ElementO::Memory* const out = row_of_tile<ElementO>(p, p.o, tile, at);
#pragma unroll
    for (int i = 0; i < kCombineEights; ++i)
      if (exists(i))
        store_pair(p, out, 8 * (first_eight + i) + int(thread_column()),
                   ElementO::pack(x[i][2 * half] * scale, x[i][2 * half + 1] * scale));
    if (first_eight == 0 && threadIdx.x % 4 == 0) store_lse(p, tile, at, shift[half], sum[half]);
  }
}
