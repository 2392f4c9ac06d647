// What the backward pass wants of each row before it starts: -LSE log2(e), and -(D - dLSE) with D = rowsum(dO o O)
// (FlashAttention-2, algorithm 2, line 4); and zeros: a piece of dS, the sums of dQ,
// and the gradients of packed rows behind the last sequence, which no kernel after it writes.
#include "shared/fragment_store.cuh"
#include "shared/schedule.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_params.h"

enum : int {
  kLanes = 16,  // of a row
  kRowsOfWarp = 32 / kLanes,
};

// 8 columns from `column` on, of which `count` exist.
__device__ __forceinline__ void load_columns(const unsigned short* from, int count, float (&x)[8]) {
  if (!kElements && count > 0) {
    const uint4 packed = *reinterpret_cast<const uint4*>(from);
    const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = low_of(pairs[i]);
      x[2 * i + 1] = high_of(pairs[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i < count ? to_float(from[i]) : 0;
}

// rowsum(dO o O) over a half-warp.
__device__ __forceinline__ float row_product(const BackwardParams& p, int batch, int row, int head) {
  const unsigned short* out = row_of(p.out, batch, row, head);
  const unsigned short* dout = row_of(p.dout, batch, row, head);
  float sum = 0;
#pragma unroll
  for (int first = 0; first < kValueDim; first += 8 * kLanes) {
    const int column = first + 8 * int(threadIdx.x % kLanes);
    float x[8];
    float y[8];
    load_columns(out + column, p.dv - column, x);
    load_columns(dout + column, p.dv - column, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  }
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  return sum;
}

// Zero rows [first, count) of a packed tensor.
__device__ __forceinline__ void clear_rows(const StridedTensor& t, int first, int count, int heads, int dim) {
  for (long long row = first + (long long)(blockIdx.x); row < count; row += gridDim.x)
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) t.data[row * t.row + i / dim * t.head + i % dim] = 0;
}

// Grid: (row chunks of the longest sequence, batch * hq).
extern "C" __global__ void __launch_bounds__(256)
    fulgur_backward_prepare(const __grid_constant__ BackwardParams p) {
  if (blockIdx.y == 0) {
    if (!kSums && blockIdx.x == 0)
      for (int i = threadIdx.x; i < kPieceBytes / 4; i += blockDim.x) reinterpret_cast<int*>(p.zeros)[i] = 0;
    if (kPacked) {
      clear_rows(p.dq, max(p.cu_seqlens_q[p.batch], 0), p.total_q, p.hq, p.d);
      clear_rows(p.dk, max(p.cu_seqlens_k[p.batch], 0), p.total_k, p.hq / p.group, p.d);
      clear_rows(p.dv_grad, max(p.cu_seqlens_k[p.batch], 0), p.total_k, p.hq / p.group, p.dv);
    }
  }
  const int rows_of_block = blockDim.x / kLanes;
  for (int pair = blockIdx.y; pair < p.batch * p.hq; pair += gridDim.y) {
    const int batch = pair / p.hq;
    const int head = pair % p.hq;
    const Lengths n = lengths_of(p, batch);
    const int end = count_of(n.sq, kStatisticsRows) * kStatisticsRows;
    const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
    for (int row = blockIdx.x * rows_of_block + threadIdx.x / kLanes; row < end; row += gridDim.x * rows_of_block) {
      const bool exists = row < n.sq;
      if (kSums) {
        float4* sums = reinterpret_cast<float4*>(p.dq_sums + (at + row) * (64 * kHeadPanels));
#pragma unroll
        for (int i = 0; i < kHeadPanels; ++i) sums[i * kLanes + threadIdx.x % kLanes] = {0, 0, 0, 0};
      }
      const float product = row_product(p, batch, n.q_start + (exists ? row : 0), head);
      if (threadIdx.x % kLanes != 0) continue;
      float shift = -infinity();
      float delta = 0;
      if (exists) {
        const float lse = p.lse.data[batch * p.lse.batch + head * p.lse.head + n.q_start + row];
        const bool sees = lse != -infinity();
        if (sees) shift = -lse * 1.4426950408889634f;
        const float dlse =
            kHasDlse && sees ? p.dlse.data[batch * p.dlse.batch + head * p.dlse.head + n.q_start + row] : 0;
        if (sees) delta = dlse - product;
      }
      p.shift[at + row] = shift;
      p.delta[at + row] = delta;
    }
  }
}
