// The two products of a key tile, S = Q K^T and O += P V, by the warps of a CTA. A warp has 16 rows of each of its
// kWarpStrips strips, and multiplies all of them with each fragment of K and V that it loads.
#pragma once
#include "attention/products_f32.cuh"
#include "portable/forward/queries.cuh"

// S += Q K^T for 16 columns. `address`: of the lane's part of K.
template <bool kept>
__device__ __forceinline__ void multiply_step(float (&S)[kWarpStrips][kBlockKeys / 2], const Queries& q, u32 address,
                                              int step) {
  u32 a[kWarpStrips][4];
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip) q.template get<kept>(strip, step, a[strip]);
#pragma unroll
  for (int key = 0; key < kBlockKeys; key += 16) {
    u32 b[4];
    load_shared_matrices((address ^ step % 4 * 32) + step / 4 * kPanelBytes + key * kPanelRowBytes, b);
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
      multiply_16_8_16<ElementK::kType>(S[strip] + key / 2, a[strip], b[0], b[1]);
      multiply_16_8_16<ElementK::kType>(S[strip] + key / 2 + 4, a[strip], b[2], b[3]);
    }
  }
}

// Steps with Q in shared memory are unrolled by four, because the compiler keeps the addresses of all unrolled steps in
// registers. Tiles of more than 32 keys have registers for all steps, unless other options need them.
enum : int {
  kAllSteps = kWarpStrips == 2 && !kQInRegisters && kBlockKeys > 32 && !kPacked && !kPage && !kBatchIdx && !kLeftPad &&
              !kTree,
  kStepsAtOnce = kAllSteps || kQKept > 0 ? 16 : 4,
};

// S = Q K^T for the tile at `k`.
__device__ __forceinline__ void multiply_scores(float (&S)[kWarpStrips][kBlockKeys / 2], const Queries& q, u32 k) {
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) S[strip][i] = 0;
  if constexpr (ElementK::kType == kF32) {
    return add_products_of_rows<kHeadDim>(
        S, [&](int strip, int step, u32 (&a)[4]) { q.template get<false>(strip, step, a); }, k, kPanelBytes);
  }
  const u32 lane = threadIdx.x % 32;
  const u32 address = k + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < kKeptSteps; ++step) multiply_step<true>(S, q, address, step);
#pragma unroll kStepsAtOnce
  for (int step = kKeptSteps; step < kSteps; ++step) multiply_step<false>(S, q, address, step);
}

// O += P V for the tile at `v`.
__device__ __forceinline__ void multiply_values(float (&O)[kWarpStrips][kValueDim / 2],
                                                const u32 (&P)[kWarpStrips][kPWords], u32 v) {
  if constexpr (ElementV::kType == kF32) return add_products_of_columns(O, P, v, kPanelBytes);
  const u32 lane = threadIdx.x % 32;
  const u32 address = v + swizzled(lane % 16, lane / 16);
#pragma unroll
  for (int key = 0; key < kBlockKeys; key += 16)
#pragma unroll
    for (int column = 0; column < kValueDim; column += 16) {
      u32 b[4];
      load_shared_matrices_transposed(
          (address ^ column % 64 * 2) + column / 64 * kPanelBytes + key * kPanelRowBytes, b);
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip) {
        multiply_16_8_16<ElementV::kType>(O[strip] + column / 2, P[strip] + key / 4, b[0], b[1]);
        multiply_16_8_16<ElementV::kType>(O[strip] + column / 2 + 4, P[strip] + key / 4, b[2], b[3]);
      }
    }
}
