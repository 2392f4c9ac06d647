// Q of a warp: the first operand of S = Q K^T.
#pragma once
#include "attention/fragment.cuh"
#include "attention/softmax.cuh"
#include "portable/forward/load.cuh"

// Steps of a product along d, each of 32 bytes of a row; and those of Q in registers: all of them, or the first kQKept,
// of which shared memory has all.
enum : int { kSteps = kHeadDim / ElementQ::kStep, kKeptSteps = kQInRegisters ? kSteps : kQKept };

// Q of a warp, in shared memory or in registers.
class Queries {
 public:
  // `strip`: the first strip of the warp in the CTA.
  __device__ __forceinline__ Queries(u32 smem, int strip) {
    const u32 lane = threadIdx.x % 32;
    address_ = smem + kLayout.q + strip * kLayout.strip_bytes + swizzled(warp_row() + lane % 16, lane / 16);
  }
  // Loads registers, after Q is complete in shared memory.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
      for (int step = 0; step < kKeptSteps; ++step) load_shared_matrices(place(strip, step), kept_[strip][step]);
  }
  // The columns of a step of the rows of a strip. `kept`: step < kKeptSteps.
  template <bool kept>
  __device__ __forceinline__ void get(int strip, int step, u32 (&a)[4]) const {
    if constexpr (kept) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = kept_[strip][step][i];
    } else {
      load_shared_matrices(place(strip, step), a);
    }
  }

 private:
  __device__ __forceinline__ u32 place(int strip, int step) const {
    return (address_ ^ step % 4 * 32) + strip * kLayout.strip_bytes + step / 4 * kStripPanelBytes;
  }

  u32 address_;
  u32 kept_[kWarpStrips][max_of(kKeptSteps, 1)][4];
};
