// Words of a bool mask of bits (kMaskBits). They come with K of the tiles in which the mask hides some key.
#pragma once
#include "attention/mask.cuh"
#include "attention/mask_bits.cuh"
#include "device/memory.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"

// The words of a thread for the scores of a key tile.
struct MaskWords {
  u32 word[max_of(kMaskWords, 1)];

  // From shared memory, where the strip's words begin at `tile`; all ones where only bounds hide keys.
  __device__ __forceinline__ void load(u32 tile, int masked_by) {
    const u32 at = tile + threadIdx.x % 128 * 4;
#pragma unroll
    for (int i = 0; i < kMaskWords; ++i)
      word[i] = masked_by & kMaskedByMask ? load_shared(at + i * kMaskThreads * 4) : ~0;
  }

  // The rows after the first `valid` ones of the strip see all keys.
  __device__ __forceinline__ void show_to_rows_from(int valid) {
    valid -= int(warp_row() + thread_row());
    const u32 ones = (valid <= 0 ? 0x33333333u : 0) | (valid <= 8 ? 0xccccccccu : 0);
#pragma unroll
    for (u32& x : word) x |= ones;
  }
};

// Calls step(masked_by), with a constant for the usual values. There is then no branch between the products and the
// softmax of the step, and the compiler moves the first exponentials before the wait for O += P V.
template <class Step>
__device__ __forceinline__ void with_masked_by(const KeyWalk& walk, const Step& step) {
  if constexpr (kMapsTiles) {
    const int masked_by = walk.masked_by();
    if constexpr (kConsumers == 1) step(masked_by);  // it has no registers for two
    else if (masked_by == 0) step(0);
    else if (kMaskBits && (!kBoundsApart || masked_by == kMaskedByMask)) step(kMaskedByMask);
    else step(masked_by);  // few tiles of a call
  } else {
    step(0);
  }
}
