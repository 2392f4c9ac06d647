// The two products of a tile: a warp's by mma.sync where a team has few rows, a warpgroup's by wgmma where it has 64.
// Both leave the same fragments (shared/fragment.cuh).
#pragma once
#include "shared/descriptor.cuh"
#include "shared/mma.cuh"
#include "sm90/decode_load.cuh"

enum : int {
  kProductRows = kWide ? 64 : kWarpRows,
  kQPanelBytes = kBlockRows * 128,
};

// S = Q K^T by wgmma.
__device__ __forceinline__ void multiply_scores_wide(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 Q = uniform_descriptor(q, 0);
  const u32 K = uniform_descriptor(k, 0);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int inside = step % 4 * 32;
    Wgmma<kBlockKeys>::multiply<kAlongK, kAlongK>(S, Q + ((step / 4 * kQPanelBytes + inside) >> 4),
                                                  K + ((step / 4 * kPanelBytes + inside) >> 4), step != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  register_fence(S);
}

// O += P V by wgmma.
__device__ __forceinline__ void multiply_values_wide(float (&O)[kValueDim / 2], u32 (&P)[kBlockKeys / 4], u32 v) {
  const u32 V = uniform_descriptor(v, kPanelBytes);
  register_fence(O);
  register_fence(P);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; ++step)
    Wgmma<kValueDim>::multiply<kAcrossK>(O, P + 4 * step, V + (step * 16 * 128 >> 4), 1);
  wgmma_commit();
  wgmma_wait<0>();
  register_fence(O);
}

// S = Q K^T of the rows whose Q lies at `q`, and the tile at `k`, by mma.sync.
__device__ __forceinline__ void multiply_scores_narrow(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) S[i] = 0;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    u32 a[4];
    load_shared_matrices(q + step / 4 * kQPanelBytes + swizzled(lane % 16, step % 4 * 2 + lane / 16), a);
#pragma unroll
    for (int keys = 0; keys < kBlockKeys; keys += 16) {
      u32 b[4];
      const u32 row = keys + lane % 8 + lane / 16 * 8;
      load_shared_matrices(k + step / 4 * kPanelBytes + swizzled(row, step % 4 * 2 + lane / 8 % 2), b);
      multiply_16_8_16(S + keys / 2, a, b[0], b[1]);
      multiply_16_8_16(S + keys / 2 + 4, a, b[2], b[3]);
    }
  }
}

// O += P V by mma.sync.
__device__ __forceinline__ void multiply_values_narrow(float (&O)[kValueDim / 2], const u32 (&P)[kBlockKeys / 4], u32 v) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int keys = 0; keys < kBlockKeys; keys += 16)
#pragma unroll
    for (int column = 0; column < kValueDim; column += 16) {
      u32 b[4];
      load_shared_matrices_transposed(
          v + column / 64 * kPanelBytes + swizzled(keys + lane % 16, column % 64 / 8 + lane / 16), b);
      multiply_16_8_16(O + column / 2, P + keys / 4, b[0], b[1]);
      multiply_16_8_16(O + column / 2 + 4, P + keys / 4, b[2], b[3]);
    }
}

// S = Q K^T of the tile whose K lies at `k`.
__device__ __forceinline__ void multiply_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  if constexpr (kWide)
    multiply_scores_wide(S, q, k);
  else
    multiply_scores_narrow(S, q, k);
}

// O += P V of the tile whose V lies at `v`.
__device__ __forceinline__ void multiply_values(float (&O)[kValueDim / 2], u32 (&P)[kBlockKeys / 4], u32 v) {
  if constexpr (kWide)
    multiply_values_wide(O, P, v);
  else
    multiply_values_narrow(O, P, v);
}
