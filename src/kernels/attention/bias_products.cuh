// A bias of bf16 that products of the tensor cores add (kBiasTerms): accumulators of scores begin with bias / scale, so
// that nothing converts or adds its elements one by one. mma.sync waits for products that other warps have issued before
// it. Therefore it comes before the products of the scores, which wait for these, too.
#pragma once
#include "attention/bias_tile.cuh"
#include "attention/fragment.cuh"
#include "device/mma_sync.cuh"
#include "host_device/score.h"
#include "kernel_config.h"

enum : int { kBiasByProducts = kBiasTerms > 0 };

// Operand B of these products, 1 / scale times the identity: a sum of kBiasTerms numbers of bf16.
struct BiasUnit {
  u32 terms[max_of(kBiasTerms, 1)];
};

__device__ __forceinline__ BiasUnit bias_unit(float factor) {
  BiasUnit unit = {};
  const int of_pair = int(thread_row()) - int(thread_column());  // which of the thread's two rows has the diagonal
#pragma unroll
  for (int i = 0; i < kBiasTerms; ++i) {
    const u32 pair = BiasType::pack(factor, factor);
    factor -= BiasType::low(pair);
    unit.terms[i] = of_pair == 0 ? pair & 0xffff : of_pair == 1 ? pair & 0xffff0000 : 0;
  }
  return unit;
}

// A word of the bias without -inf, as -inf * 0 is NaN: what hides is the least finite number. 1 / scale is at least 2, so
// that its sums are -inf. `hides`: so are those of all numbers below kHidingBias; otherwise they may be sums of such a
// number and a product.
template <bool hides>
__device__ __forceinline__ u32 finite_bias(u32 word) {
  constexpr u32 kLeastPair = 0xff7fff7f, kHidingPair = 0xf900f900;
  static_assert(kHidingBias == -0x1p115);
  if constexpr (!hides) return max_of_bf16_pairs(word, kLeastPair);
  const u32 hidden = less_bf16_pairs(word, kHidingPair);
  return (word & ~hidden) | (kLeastPair & hidden);
}

// The accumulators of 16 columns become bias / scale. `words` of the bias: in the order of operand A. NaN and +inf reach
// the eight columns of their row.
template <bool hides>
__device__ __forceinline__ void begin_with_bias(float* scores, const u32* words, const BiasUnit& unit) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 A[2] = {finite_bias<hides>(words[2 * i]), finite_bias<hides>(words[2 * i + 1])};
    multiply_16_8_8_bf16<false>(scores + 4 * i, A, unit.terms[0]);
#pragma unroll
    for (int j = 1; j < kBiasTerms; ++j) multiply_16_8_8_bf16<true>(scores + 4 * i, A, unit.terms[j]);
  }
}
