// Words of a dense bias of 16 bits, two elements each, in a thread's registers (kBiasInRegisters). It loads them before
// it issues the products of the tile, and so waits for no shared memory once it has the scores.
#pragma once
#include "attention/bias_products.cuh"
#include "attention/softmax.cuh"
#include "sm90/forward/layout.cuh"

// The words of a tile, one for two scores, in the order of P. Added to a score, a bias that hides makes -inf, a number
// for which P is 0, or NaN. NaN makes the softmax look for a new maximum, before which hide_by_bias_words() is called.
__device__ __forceinline__ void load_bias_words(u32 (&words)[kPWords], u32 tile, u32 lane = threadIdx.x % 32) {
  // A column of a panel is some bits of the address: an exclusive or finds it, and no register holds each address.
  constexpr int kPanelWords = kPanelRowBytes / 8;
  const u32 first = bias_address<64>(tile, warp_row() + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int i = 0; i < kBiasWords; i += 4) {
    const u32 panel = i / kPanelWords * bias_panel_bytes(kBiasRows, kStripRows);
    load_shared_matrices(kBiasInP ? (first + panel) ^ i % kPanelWords * 8 : bias_words_address(tile, 4 * i),
                         words + i);
  }
}

// Scores begin with the bias, kBiasByProducts. Of what hides and is finite see load_bias_words.
__device__ __forceinline__ void begin_scores(float (&S)[kBlockKeys / 2], const u32 (&words)[kPWords],
                                             const BiasUnit& unit) {
#pragma unroll
  for (int i = 0; i < kBiasWords; i += 4) begin_with_bias<false>(S + 2 * i, words + i, unit);
  register_fence(S);
}

// -inf for the scores that the bias hides.
__device__ __forceinline__ void hide_by_bias_words(float (&S)[kBlockKeys / 2], const u32 (&words)[kPWords]) {
#pragma unroll
  for (int i = 0; i < kBiasWords; i += 4) {
    float bias[8];
    unpack_bias(words + i, bias);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (bias[j] < float(kHidingBias)) S[2 * i + j] = -infinity();
  }
}
