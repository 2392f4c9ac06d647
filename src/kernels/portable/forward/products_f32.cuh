// The two products of a key tile for f32 operands.
#pragma once
#include "portable/common/products_f32.cuh"
#include "portable/forward/queries.cuh"

// S += Q K^T for the tile at `k`.
__device__ __forceinline__ void add_scores_f32(float (&S)[kWarpStrips][kBlockKeys / 2], const Queries& q, u32 k) {
  add_products_of_rows<kHeadDim>(
      S, [&](int strip, int step, u32 (&a)[4]) { q.template get<false>(strip, step, a); }, k, kPanelBytes);
}

// O += P V for the tile at `v`.
__device__ __forceinline__ void add_values_f32(float (&O)[kWarpStrips][kValueDim / 2],
                                               const u32 (&P)[kWarpStrips][kPWords], u32 v) {
  constexpr int kKeySteps = kBlockKeys / 8;
  PartsOfA a[kWarpStrips][kKeySteps];
#pragma unroll
  for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) a[strip][i].big[word] = P[strip][4 * i + word];
      a[strip][i].split();
    }
  const u32 pair = pair_address(v);
#pragma unroll
  for (int column = 0; column < kValueDim; column += 16) {
    SumsOfColumns<kWarpStrips> sums;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i)
      sums.add([&](int strip) -> const PartsOfA& { return a[strip][i]; },
               column_address(pair, column, kPanelBytes) + i * 8 * kPanelRowBytes);
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) sums.add_to(strip, O[strip] + column / 2);
  }
}
