// The two products of a key tile, S = Q K^T and O += P V, by the warps of a CTA. A warp has 16 rows of each of its
// kWarpStrips strips, and multiplies all of them with what it loads of K and V.
#pragma once
#include "attention/fragment.cuh"
#include "portable/forward/load.cuh"

// The Q of a warp: in shared memory, or all of it in registers.
class Queries {
 public:
  // `strip`: the first of the warp's in the CTA.
  __device__ __forceinline__ Queries(u32 smem, int strip) {
    const u32 lane = threadIdx.x % 32;
    address_ = smem + kLayout.q + strip * kLayout.strip_bytes + swizzled(warp_row() + lane % 16, lane / 16);
  }
  // Once Q is there, for all warps.
  __device__ __forceinline__ void load() {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_shared_matrices(place(strip, step), fragments_[strip][step]);
    }
  }
  // 16 columns of the rows of a strip.
  __device__ __forceinline__ void get(int strip, int step, u32 (&a)[4]) const {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = fragments_[strip][step][i];
    } else {
      load_shared_matrices(place(strip, step), a);
    }
  }

 private:
  enum : int { kSteps = kQInRegisters ? kHeadDim / 16 : 1 };

  __device__ __forceinline__ u32 place(int strip, int step) const {
    return (address_ ^ step % 4 * 32) + strip * kLayout.strip_bytes + step / 4 * kStripPanelBytes;
  }

  u32 address_;
  u32 fragments_[kWarpStrips][kSteps][4];
};

// S = Q K^T of the tile at `k`.
__device__ __forceinline__ void multiply_scores(float (&S)[kWarpStrips][kBlockKeys / 2], const Queries& q, u32 k) {
  const u32 lane = threadIdx.x % 32;
  const u32 address = k + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) S[strip][i] = 0;
#pragma unroll kQInRegisters ? 16 : 4
  for (int step = 0; step < kHeadDim / 16; ++step) {
    u32 a[kWarpStrips][4];
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) q.get(strip, step, a[strip]);
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
}

// O += P V of the tile at `v`.
__device__ __forceinline__ void multiply_values(float (&O)[kWarpStrips][kValueDim / 2],
                                                const u32 (&P)[kWarpStrips][kBlockKeys / 4], u32 v) {
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
