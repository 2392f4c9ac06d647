// The products of the wide path, of a chunk at a time, by mma.sync.
#pragma once
#include "decode/wide/tile.cuh"

// S += Q K^T of the columns of chunk `chunk` of K at `k`, for the keys of the warp.
__device__ __forceinline__ void multiply_scores(WideScores& S, const WideWarp& warp, u32 k, int chunk) {
  constexpr int kSteps = kHeadDim / 16, kChunkSteps = kKChunkPanels * kPanelSteps;
  const u32 lane = threadIdx.x % 32;
  const u32 q = shared_base() + kLayout.q + chunk * kKChunkPanels * kQPanelBytes + warp.first_row * kPanelRowBytes +
                swizzled(lane % 16, lane / 16);
  k += warp.first_key() * kPanelRowBytes + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < kChunkSteps; ++step) {
    if (kSteps % kChunkSteps != 0 && chunk * kChunkSteps + step >= kSteps) break;
    u32 a[kWarpStrips][4];
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
      load_shared_matrices(
          (q ^ step % 4 * 32) + step / 4 * kQPanelBytes + strip * kWarpRows * kPanelRowBytes, a[strip]);
#pragma unroll
    for (int keys = 0; keys < kWarpKeys; keys += 16) {
      u32 b[4];
      load_shared_matrices((k ^ step % 4 * 32) + step / 4 * kPanelBytes + keys * kPanelRowBytes, b);
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip) {
        multiply_16_8_16<ElementK::kType>(S[strip] + keys / 2, a[strip], b[0], b[1]);
        multiply_16_8_16<ElementK::kType>(S[strip] + keys / 2 + 4, a[strip], b[2], b[3]);
      }
    }
  }
}

// O += P V of the keys of chunk `chunk` of V at `v`, for the columns of the warp. P lies in shared memory.
__device__ __forceinline__ void multiply_values(WideOutput& O, const WideWarp& warp, u32 v, int chunk) {
  const u32 lane = threadIdx.x % 32;
  const u32 p = shared_base() + kLayout.exchange + warp.first_row * kPanelRowBytes + swizzled(lane % 16, lane / 16);
  v += swizzled(lane % 16, lane / 16);
#pragma unroll
  for (int keys = 0; keys < kVChunkKeys; keys += 16) {
    const int key = chunk * kVChunkKeys + keys;
    u32 a[kWarpStrips][4];
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
      load_shared_matrices(
          (p ^ key % 64 * 2) + key / 64 * kPPanelBytes + strip * kWarpRows * kPanelRowBytes, a[strip]);
#pragma unroll
    for (int column = 0; column < kShareColumns; column += 16) {
      if (!warp.has_columns(column)) break;
      const int at = warp.first_column() + column;
      u32 b[4];
      load_shared_matrices_transposed((v ^ at % 64 * 2) + at / 64 * kVChunkPanelBytes + keys * kPanelRowBytes, b);
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip) {
        multiply_16_8_16<ElementV::kType>(O[strip] + column / 2, a[strip], b[0], b[1]);
        multiply_16_8_16<ElementV::kType>(O[strip] + column / 2 + 4, a[strip], b[2], b[3]);
      }
    }
  }
}
