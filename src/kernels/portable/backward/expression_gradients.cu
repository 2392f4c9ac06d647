// The gradients of tensors that score_mod indexes, on every GPU since Turing: dS times the derivative of the score by
// an element, summed over all scores that it enters. S and dS are computed again (score_tiles.cuh).
//
// A CTA takes 64 queries of a head and iterates over their key tiles. Addends of elements that depend on the row alone,
// or on the key alone, are first summed in registers and over lanes. Other scores are added one by one, unless all
// scores of a warp belong to the same element. Sums are integers in units that depend on the largest addend, which a
// first launch finds, so that their bits do not depend on the order of additions.
#include "portable/backward/score_tiles.cuh"

template <int number>
struct Gradient {
  enum : int { kNumber = number, kOfRows = kGradientPlaces[number] & 1, kOfKeys = kGradientPlaces[number] >> 1 & 1 };
};

__device__ __forceinline__ float sum_of_warp(float x, int from) {
#pragma unroll
  for (int lanes = from; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

// Adds to the sum of an element, or to the maximum of addends in the first launch.
__device__ __forceinline__ void add_to_element(const BackwardParams& p, int tensor, int element, float x) {
  const ExpressionSums& s = p.expression.tensors[tensor].sums;
  if (x == 0) return;
  if (!(fabsf(x) < infinity())) {
    s.spoiled[element] = 1;
  } else if (p.expression.finds_largest) {
    atomicMax(s.largest, __float_as_int(fabsf(x)));
  } else {
    const double units = __dmul_rn(double(x), unit_of(*s.largest, p.expression.log_scores));
    atomicAdd(reinterpret_cast<unsigned long long*>(s.sums + element),
              static_cast<unsigned long long>((long long)(units)));
  }
}

// The sums of a thread for rows r and r + 8, for gradients whose elements do not depend on the key.
using RowSums = float[max_of(kTensorGradients, 1)][2];

// Adds a tile of scores, from products in X and dS.
template <int number = 0>
__device__ __forceinline__ void add_tile(const BackwardParams& p, const float (&X)[kBlockKeys / 2],
                                         const float (&dS)[kBlockKeys / 2], const ScoreContext& at, RowSums& rows) {
  if constexpr (number < kTensorGradients) {
    using G = Gradient<number>;
    constexpr int kTensor = kGradientTensor[G::kNumber];
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float of_key = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = i + 2 * half + column;
          const auto place = expression_place(p, at.moved(8 * half, i / 4 * 8 + column));
          const float before = natural_score(p, at.moved(8 * half, i / 4 * 8 + column), X[j]);
          const float x = dS[j] == 0 ? 0 : dS[j] * p.p_scale * expression_gradient<G::kNumber>(place, before);
          if constexpr (!G::kOfKeys) {
            rows[G::kNumber][half] += x;
          } else if constexpr (!G::kOfRows) {
            of_key += x;
          } else {
            const int element = expression_element<G::kNumber>(place, before);
            if (__all_sync(0xffffffff, element == __shfl_sync(0xffffffff, element, 0))) {
              const float sum = sum_of_warp(x, 1);
              if (threadIdx.x % 32 == 0) add_to_element(p, kTensor, element, sum);
            } else {
              add_to_element(p, kTensor, element, x);
            }
          }
        }
        if constexpr (G::kOfKeys && !G::kOfRows) {
          const float sum = sum_of_warp(of_key, 4);
          const auto place = expression_place(p, at.moved(0, i / 4 * 8 + column));
          if (thread_row() == 0) add_to_element(p, kTensor, expression_element<G::kNumber>(place, 0), sum);
        }
      }
    }
    add_tile<number + 1>(p, X, dS, at, rows);
  }
}

// Adds the sums of a thread for its rows.
template <int number = 0>
__device__ __forceinline__ void add_rows(const BackwardParams& p, const ScoreContext& at, RowSums& rows) {
  if constexpr (number < kTensorGradients) {
    using G = Gradient<number>;
    if constexpr (!G::kOfKeys) {
      constexpr int kTensor = kGradientTensor[G::kNumber];
      float (&sums)[2] = rows[G::kNumber];
      if constexpr (!G::kOfRows) {
        const float sum = sum_of_warp(sums[0] + sums[1], 1);
        const int element = expression_element<G::kNumber>(expression_place(p, at), 0);
        if (threadIdx.x % 32 == 0) add_to_element(p, kTensor, element, sum);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = quad_sum(sums[half]);
          const int element = expression_element<G::kNumber>(expression_place(p, at.moved(8 * half, 0)), 0);
          if (threadIdx.x % 4 == 0) add_to_element(p, kTensor, element, sum);
        }
      }
    }
    add_rows<number + 1>(p, at, rows);
  }
}

extern __shared__ __align__(1024) unsigned char raw[];

// Grid: row tiles of all heads.
extern "C" __global__ void __launch_bounds__(kThreads)
    fulgur_expression_gradients(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (kDropout && threadIdx.x == 0) store_dropout_key(p, smem + kLayout.dropout_key);
  const int row_tiles = (p.sq + kBlockRows - 1) / kBlockRows;
  const int row = int(blockIdx.x) % row_tiles * kBlockRows;
  const int head = int(blockIdx.x) / row_tiles % p.hq;
  const int batch = int(blockIdx.x) / row_tiles / p.hq;
  const Lengths n = lengths_of(p, batch);
  if (row >= n.sq) return;
  const KeyTiles seen = key_tiles(band_of(p), n, kBlockKeys, row, min(row + kBlockRows, n.sq) - 1);
  const ScoreHead of_head = score_head(p, n, batch, head);
  const int query = row + int(warp_row() + thread_row());
  const int diagonal = diagonal_of(band_of(p), n, query);
  RowSums rows = {};
#pragma unroll 1
  for (int tile = seen.begin; tile < seen.end; ++tile) {
    float X[kBlockKeys / 2];
    float dS[kBlockKeys / 2] = {};
    add_score_tile(p, smem, dS, X, batch, head, row, tile * kBlockKeys, n);
    add_tile(p, X, dS, score_context(of_head, query, diagonal, tile * kBlockKeys + int(thread_column())), rows);
  }
  add_rows(p, score_context(of_head, query, diagonal, 0), rows);
}
