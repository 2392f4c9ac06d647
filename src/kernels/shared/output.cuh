// The end of a strip's rows: LSE, and O from registers to global memory.
#pragma once
#include "shared/scores.cuh"
#include "shared/softmax.cuh"

// How O leaves: through shared memory by TMA; from registers, 16 bytes at a time; from registers by elements.
enum Store : int { kStoreTiles, kStoreRows, kStoreElements };

__device__ __forceinline__ const unsigned short* row_of(const StridedTensor& t, int batch, int row, int head) {
  return t.data + (kPacked ? 0 : batch * t.batch) + row * t.row + head * t.head;
}
__device__ __forceinline__ unsigned short* output_row(const AttentionParams& p, const Place& place, const Lengths& n,
                                                      int row) {
  return const_cast<unsigned short*>(row_of(p.o, place.batch, n.q_start + row, place.head));
}

// A row without keys has sum 0 and gets log(0) = -inf.
__device__ __forceinline__ float lse_of(float sum, float shift) {
  return sum == 0 ? -infinity() : (log2_fast(sum) - shift) * 0.693147180559945f;
}

__device__ __forceinline__ void store_global_lse(const AttentionParams& p, const Place& place, const Lengths& n,
                                                 int row, const Rows& rows) {
  float* lse = p.lse + place.batch * p.lse_batch_stride + place.head * p.lse_head_stride + n.q_start;
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (row + 8 * i < n.sq) lse[row + 8 * i] = lse_of(rows.sum[i], rows.shift[i]);
  }
}

// Packed values on their way out, and whether all so far were finite.
struct Finite {
  u32 trace = 0;  // 0 * everything
  __device__ __forceinline__ void add(u32 packed) {
    if (kHasLeft || kHasRight) trace = packed_fma(packed, 0, trace);
  }
};

// 8 columns of a row of O, of which `count` exist.
__device__ __forceinline__ void store_global_columns(unsigned short* to, const u32 (&x)[4], int count) {
  if (kStore != kStoreElements) {
    if (count > 0) *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) to[i] = static_cast<unsigned short>(x[i / 2] >> (i % 2 * 16));
  }
}

// A 4 x 4 transposition over a quad, in two exchanges: x[j] of lane i goes to x[i] of lane j.
__device__ __forceinline__ void quad_transpose(u32 (&x)[4]) {
  const u32 quad = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!(j & bit)) {
        const u32 give = quad & bit ? x[j] : x[j + bit];
        const u32 got = __shfl_xor_sync(0xffffffff, give, bit);
        if (quad & bit) x[j] = got;
        else x[j + bit] = got;
      }
  }
}

// The 16 rows of a warp straight from registers: quads exchange so that a thread holds 8 adjacent columns of a row, 16
// bytes.
__device__ __forceinline__ void store_global_rows(const AttentionParams& p, const Place& place, const Lengths& n,
                                                  int row, const float (&O)[kValueDim / 2], float scale0,
                                                  float scale1, Finite& finite) {
  row += thread_row();
  unsigned short* out = output_row(p, place, n, row);
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i += 16) {  // 32 columns, the last time perhaps 16
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = half ? scale1 : scale0;
      u32 x[4];  // x[j]: this thread's pair of columns of the j-th group of 8
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i + 4 * j + 2 * half;
        x[j] = at < kValueDim / 2 ? pack(O[at] * scale, O[at + 1] * scale) : 0;
        if (half == 0) finite.add(x[j]);
      }
      quad_transpose(x);
      const int column = 2 * i + 8 * u32(threadIdx.x % 4);
      if (row + 8 * half < n.sq) store_global_columns(out + 8 * half * p.o.row + column, x, p.dv - column);
    }
  }
}
