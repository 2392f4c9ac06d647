// The end of an item: what its teams have is put together, and so are the parts of a line.
#pragma once
#include "shared/softmax.cuh"
#include "sm90/decode_load.cuh"

// Four columns of a row of O on their way out; `scale` is one over the sum.
__device__ __forceinline__ void store_columns(const DecodeParams& p, unsigned short* row, int column,
                                              const float4& x, float scale) {
  const u32 low = pack(x.x * scale, x.y * scale);
  const u32 high = pack(x.z * scale, x.w * scale);
  if (p.o_whole && column + 4 <= p.dv) {
    *reinterpret_cast<uint2*>(row + column) = {low, high};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < p.dv) row[column + i] = static_cast<unsigned short>((i < 2 ? low : high) >> (i % 2 * 16));
}

__device__ __forceinline__ void store_lse(const DecodeParams& p, const DecodeItem& item, int row, float shift,
                                          float sum) {
  if (!kHasLse) return;
  float* lse = p.lse + item.batch * p.lse_batch_stride + (item.head * p.group + row % p.group) * p.lse_head_stride;
  lse[item.sequence.n.q_start + row / p.group] = lse_of(sum, shift);
}

// What the sum and O relative to `shift` are multiplied with where `new_shift` counts.
__device__ __forceinline__ float factor_of(float shift, float new_shift) {
  return shift == infinity() ? 0 : exp2_fast(new_shift - shift);
}

// The part of an item's line that this thread block leaves, or that another one has left. A thread block has at most
// two: of the line in which its share begins, and of the one in which it ends.
__device__ __forceinline__ float* partial_of(const DecodeParams& p, const DecodeItem& item, int part) {
  const long long slot = 2 * (item.first_share + part) + (part == 0);
  return p.partial + slot * (kBlockRows * partial_row_floats(kValueDim));
}

// Puts together what the teams have of an item, in the order of the teams: O, or this part of it.
__device__ __forceinline__ void merge_teams(const DecodeParams& p, const DecodeItem& item, const Rows& rows,
                                            const float (&O)[kValueDim / 2], unsigned char* shared) {
  const ItemRows of_item = rows_of_item(p, item);
  const bool whole = item.parts == 1;
  const int warp = threadIdx.x / 32;
  float* const partial = whole ? nullptr : partial_of(p, item, item.part);
  float2* const stats = reinterpret_cast<float2*>(shared + kLayout.stats);
  float2* const totals = reinterpret_cast<float2*>(shared + kLayout.totals);
  float* const columns = reinterpret_cast<float*>(shared + kLayout.merge);
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      stats[warp * kWarpRows + thread_row() + 8 * i] = {rows.shift[i], rows.sum[i]};
  }
  __syncthreads();
  for (int row = threadIdx.x; row < of_item.count; row += kThreads) {
    float shift = infinity();
    float sum = 0;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) shift = fminf(shift, stats[team * kBlockRows + row].x);
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      float2& of_team = stats[team * kBlockRows + row];
      of_team.x = factor_of(of_team.x, shift);
      sum += of_team.x * of_team.y;
    }
    totals[row] = {shift, sum};
    if (whole) {
      store_lse(p, item, of_item.first + row, shift, sum);
    } else {
      float* const left = partial + row * partial_row_floats(kValueDim) + kValueDim;
      left[0] = shift;
      left[1] = sum;
    }
  }
#pragma unroll
  for (int first = 0; first < kValueDim; first += kMergeColumns) {
#pragma unroll
    for (int i = 0; i < kMergeColumns / 2 && first / 2 + i < kValueDim / 2; i += 2) {
      const int row = warp * kWarpRows + thread_row() + (i & 2 ? 8 : 0);
      *reinterpret_cast<float2*>(columns + row * kMergeStride + i / 4 * 8 + thread_column()) = {O[first / 2 + i],
                                                                                               O[first / 2 + i + 1]};
    }
    __syncthreads();
    constexpr int kFours = kMergeColumns / 4;
#pragma unroll 1
    for (int at = threadIdx.x; at < of_item.count * kFours; at += kThreads) {
      const int row = at / kFours;
      const int column = at % kFours * 4;
      if (first + column >= kValueDim) continue;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        const float factor = stats[team * kBlockRows + row].x;
        const float4 x = *reinterpret_cast<const float4*>(columns + (team * kBlockRows + row) * kMergeStride + column);
        sum.x += factor * x.x;
        sum.y += factor * x.y;
        sum.z += factor * x.z;
        sum.w += factor * x.w;
      }
      if (whole)
        store_columns(p, item_row(p, p.o, item, of_item.first + row), first + column, sum,
                      normalizer(totals[row].y));
      else
        *reinterpret_cast<float4*>(partial + row * partial_row_floats(kValueDim) + first + column) = sum;
    }
    __syncthreads();
  }
}

// Puts the parts of a line together, in the order of its keys, in the thread block that leaves the last one: a warp
// takes a row, each lane the weights of some parts, then four columns of all.
__device__ __forceinline__ void merge_parts(const DecodeParams& p, const DecodeItem& item, unsigned char* shared) {
  u32* const last = reinterpret_cast<u32*>(shared + kLayout.scan);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 before = atomicInc(reinterpret_cast<unsigned*>(p.tickets) + item.first_share, item.parts - 1);
    __threadfence();
    *last = before == u32(item.parts - 1);
  }
  __syncthreads();
  if (!*last) return;
  constexpr int kRow = partial_row_floats(kValueDim);
  constexpr int kOfLane = (kMostShares + 31) / 32;
  const ItemRows of_item = rows_of_item(p, item);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < of_item.count; row += kWarps) {
    const auto part_row = [&](int part) { return partial_of(p, item, part) + row * kRow; };
    float weight[kOfLane];
    float sums[kOfLane];
    float shift = infinity();
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int part = lane + 32 * i;
      const bool is = part < item.parts;
      weight[i] = is ? load_global_fresh(part_row(part) + kValueDim) : infinity();
      sums[i] = is ? load_global_fresh(part_row(part) + kValueDim + 1) : 0;
      shift = fminf(shift, weight[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) shift = fminf(shift, __shfl_xor_sync(0xffffffff, shift, step));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      weight[i] = factor_of(weight[i], shift);
      sum += weight[i] * sums[i];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane == 0) store_lse(p, item, of_item.first + row, shift, sum);
#pragma unroll 1
    for (int column = 4 * lane; column - 4 * lane < kValueDim; column += 128) {
      float4 x = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int count = min(item.parts - 32 * i, 32);
#pragma unroll 8
        for (int j = 0; j < count; ++j) {
          const float factor = __shfl_sync(0xffffffff, weight[i], j);
          if (column >= kValueDim) continue;
          const float4 y = load_global_fresh4(part_row(32 * i + j) + column);
          x.x += factor * y.x;
          x.y += factor * y.y;
          x.z += factor * y.z;
          x.w += factor * y.w;
        }
      }
      if (column < kValueDim)
        store_columns(p, item_row(p, p.o, item, of_item.first + row), column, x, normalizer(sum));
    }
  }
}
