// What the scores of a thread take from a bool mask of bits (host_device/expression.h, attention/mask_bits.cu). Bit
// 16 h + 8 (g % 2) + 2 (g / 2) + c of a word is that of row r + 8 h and column 8 g + 2 q + c of 64 columns of
// accumulators (fragment.cuh): in this order the compiler makes predicates of seven bits with one instruction.
#pragma once
#include "kernel_config.h"
#include "attention/fragment.cuh"
#include "host_device/expression.h"

// The bias whose tiles lie in shared memory, as kBias: a mask of bits has none.
enum : int { kBiasTile = kMaskBits ? 0 : kBias };

// The element of a thread's accumulators of 64 columns that a bit is of.
__device__ constexpr int element_of_mask_bit(int bit) {
  const int half = bit / 16, group = bit % 8 / 2 * 2 + bit / 8 % 2;
  return 4 * group + 2 * half + bit % 2;
}

// `hidden` for the scores whose bits are 0. A word each 64 columns.
template <int count, int words>
__device__ __forceinline__ void hide_by_bits(float (&S)[count], const u32 (&mask)[words], float hidden) {
#pragma unroll
  for (int word = 0; word < words; ++word)
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      const int i = 32 * word + element_of_mask_bit(bit);
      if (i < count) S[i] = mask[word] >> bit & 1 ? S[i] : hidden;
    }
}

// A word of global memory that no kernel writes meanwhile.
__device__ __forceinline__ u32 load_mask_word(const u32* at) {
  u32 x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}
