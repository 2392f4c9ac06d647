// The products of a step by the warps of a CTA. Of S^T = K Q^T and dP^T = V dO^T each role computes one; for dV both
// compute S^T, each from half of the columns. The roles exchange halves, so that each warp goes on with 16 keys of
// both. P^T or dS^T passes through shared memory as a tile whose rows are keys and whose columns are rows of Q, from
// which dK and dV take their first operand as it lies, and dQ transposed.
#pragma once
#include "portable/wide_backward/ring.cuh"

using WarpScores = float[2][kWarpRows / 2];  // S^T or dP^T of a warp, two tiles of 16 keys
using TileScores = float[kWarpRows / 2];     // of one of them

// X += A B^T over the columns of a panel: A are the warp's keys of the panel at `keys`, B its rows of that at `rows`.
template <class Type>
__device__ __forceinline__ void add_scores(WarpScores& X, const Part& part, u32 keys, u32 rows) {
  const u32 lane = lane_of_warp();
  keys += swizzled(part.key + lane % 16, lane / 16);
  rows += swizzled(part.row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < kPanelSteps; ++step) {
    u32 a[2][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) load_shared_matrices((keys ^ step * kStepBytes) + t * 16 * kPanelRowBytes, a[t]);
#pragma unroll
    for (int row = 0; row < kWarpRows; row += 16) {
      u32 b[4];
      load_shared_matrices((rows ^ step * kStepBytes) + row * kPanelRowBytes, b);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        multiply_16_8_16<Type::kType>(X[t] + row / 2, a[t], b[0], b[1]);
        multiply_16_8_16<Type::kType>(X[t] + row / 2 + 4, a[t], b[2], b[3]);
      }
    }
  }
}

// Adds the products of a warp's role with the chunk at `chunk`, the number `number` of a step.
__device__ __forceinline__ void multiply_scores(WarpScores& X, const Part& part, u32 smem, u32 chunk, int number) {
#pragma unroll
  for (int i = 0; i < kRolePanels; ++i) {
    const int panel = kRolePanels * number + i;
    if (panel >= (part.role == 0 ? panels_of_role(0) : panels_of_role(1))) return;
    const u32 tile = smem + (kOfV || part.role == 0 ? 0 : kLayout.values);
    const u32 own = tile + (panel + (part.role == 0 ? first_panel(0) : first_panel(1))) * kOwnPanelBytes;
    const u32 streamed = chunk + (part.role * kRolePanels + i) * kStreamedPanelBytes;
    const u32 keys = kOfQ ? streamed : own, rows = kOfQ ? own : streamed;
    if (kOfV || ElementK::kType == ElementV::kType || part.role == 0) add_scores<ElementK>(X, part, keys, rows);
    else add_scores<ElementV>(X, part, keys, rows);
  }
}

// Exchanges halves between the two warps that have the same part: each keeps the tile of 16 keys with the number of its
// role. S and dP become those of this tile; for dV S is the sum.
__device__ __forceinline__ void exchange(const WarpScores& X, const Part& part, u32 exchanged, TileScores& S,
                                         TileScores& dP) {
  constexpr int kWarpBytes = kWarpRows / 2 * 32 * int(sizeof(float));
  const u32 warp = threadIdx.x / 32;
  const u32 mine = exchanged + warp * kWarpBytes + threadIdx.x % 32 * 16;
  const bool second = part.role == 1;
#pragma unroll
  for (int i = 0; i < kWarpRows / 2; i += 4)
    store_shared_four(mine + i * 128, second ? X[0][i] : X[1][i], second ? X[0][i + 1] : X[1][i + 1],
                      second ? X[0][i + 2] : X[1][i + 2], second ? X[0][i + 3] : X[1][i + 3]);
  __syncthreads();
  const u32 other = exchanged + (warp + kWarps / 2) % kWarps * kWarpBytes + threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < kWarpRows / 2; i += 4) {
    u32 got[4];
    load_shared16(other + i * 128, got);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float kept = second ? X[1][i + j] : X[0][i + j], given = __uint_as_float(got[j]);
      S[i + j] = kOfV ? kept + given : second ? given : kept;
      dP[i + j] = second ? kept : given;
    }
  }
}

using TileWords = u32[kWarpRows / 4];  // P^T or dS^T of 16 keys, as pack_words makes them

// Stores the words of 16 keys from `key` on and the rows from `row` on to the tile at `to`.
__device__ __forceinline__ void store_weights(const TileWords& words, u32 to, int key, int row) {
  const u32 lane = lane_of_warp();
#pragma unroll
  for (int i = 0; i < kWarpRows / 4; i += 4) {  // 16 rows
    const u32 chunk = (row + 4 * i) / 8;
    if constexpr (kStoresMatrices != 0) {
      const u32 x[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
      store_shared_matrices(to + swizzled(key + lane % 16, chunk + lane / 16), x);
    } else {
      const u32 at = to + swizzled(key + thread_row(), chunk) + lane % 4 * 4;
      store_shared(at, words[i]);
      store_shared(at + 8 * kPanelRowBytes, words[i + 1]);
      store_shared(at ^ 16, words[i + 2]);
      store_shared((at ^ 16) + 8 * kPanelRowBytes, words[i + 3]);
    }
  }
}

enum : int { kGradientSteps = kStreamedRows / 16 };  // steps of products, each of 16 streamed rows
using GradientWeights = u32[kGradientSteps][kOwnTiles][4];
using Gradient = float[kGradientPanels][kOwnTiles][8];  // of a warp: 16 columns of each panel

// Loads P or dS of the warp's own rows as the first operand of the gradient.
__device__ __forceinline__ void load_weights(GradientWeights& W, u32 from) {
  const u32 lane = lane_of_warp();
  const u32 own = uniform(threadIdx.x / 128) * (16 * kOwnTiles);
#pragma unroll
  for (int step = 0; step < kGradientSteps; ++step)
#pragma unroll
    for (int t = 0; t < kOwnTiles; ++t) {
      if constexpr (kOfQ) {
        load_shared_matrices_transposed(
            from + swizzled(lane % 8 + lane / 16 * 8, (own + 16 * t) / 8 + lane / 8 % 2) + step * 16 * kPanelRowBytes,
            W[step][t]);
      } else {
        load_shared_matrices(from + swizzled(own + 16 * t + lane % 16, 2 * step + lane / 16), W[step][t]);
      }
    }
}

// Adds the products of W with a panel of the streamed rows to the panel's part of the gradient.
template <class Type>
__device__ __forceinline__ void add_gradient(float (&G)[kOwnTiles][8], const GradientWeights& W, u32 panel) {
  const u32 lane = lane_of_warp();
  panel += swizzled(lane % 16, lane / 16) ^ uniform(threadIdx.x / 32 % 4) * 32;
#pragma unroll
  for (int step = 0; step < kGradientSteps; ++step) {
    u32 b[4];
    load_shared_matrices_transposed(panel + step * 16 * kPanelRowBytes, b);
#pragma unroll
    for (int t = 0; t < kOwnTiles; ++t) {
      multiply_16_8_16<Type::kType>(G[t], W[step][t], b[0], b[1]);
      multiply_16_8_16<Type::kType>(G[t] + 4, W[step][t], b[2], b[3]);
    }
  }
}
