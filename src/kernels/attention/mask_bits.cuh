// What the scores of a thread take from a bool mask of bits (host_device/expression.h, maps/mask_bits.cu). Bit
// 4 g + 2 h + c of a word is that of row r + 8 h and column 8 g + 2 q + c of 64 columns: bits have the order of
// accumulators (fragment.cuh).
#pragma once
#include "kernel_config.h"
#include "attention/fragment.cuh"
#include "host_device/expression.h"

// The bias whose tiles lie in shared memory, as kBias: a mask of bits has none.
enum : int { kBiasTile = kMaskBits ? 0 : kBias };

// Scores whose bits are 0 become `hidden`. A word has a thread's bits of 64 columns.
template <int count, int words>
__device__ __forceinline__ void hide_by_bits(float (&S)[count], const u32 (&mask)[words], float hidden) {
#pragma unroll
  for (int word = 0; word < words; ++word)
#pragma unroll
    for (int bit = 0; bit < 32; ++bit)
      if (const int i = 32 * word + bit; i < count) S[i] = mask[word] >> bit & 1 ? S[i] : hidden;
}

// Loads a word of global memory that no running kernel writes.
__device__ __forceinline__ u32 load_mask_word(const u32* at) {
  u32 x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}
