// Recomputes score tiles of 64 queries x 64 keys for the gradients of a bias and of tensors of score_mod: S and dP in
// fragments of four warps with 16 queries each. Q and K, then dO and V, are loaded to the same shared memory.
#pragma once
#include "attention/fragment_store.cuh"
#include "attention/products_f32.cuh"
#include "backward/bias_sums.cuh"
#include "portable/backward/bias_tile.h"
#include "portable/common/copy_rows.cuh"

__device__ constexpr PortableBiasLayout kLayout = portable_bias_layout(kOperands, kHeadDim, kValueDim);
enum : int { kThreads = 128, kPanelBytes = kPortableBiasTile * kPanelRowBytes };
static_assert(kBlockRows == kPortableBiasTile && kBlockKeys == kPortableBiasTile);

// Copies rows [row, row + 64) of a head, of which `count` exist; the others become 0.
template <class Type, int columns>
__device__ __forceinline__ void start_rows(u32 to, const StridedTensor& t, int dim, int batch, int start, int head,
                                           int row, int count) {
  const typename Type::Memory* const from = row_of<Type>(t, batch, start + row, head);
  copy_rows<Type, kThreads, kPortableBiasTile, columns, false>(
      to, t.data, dim, [&](int i) { return row + i < count ? from + i * t.row : nullptr; });
}

// X = A B^T for the warp's 16 rows.
template <class Type, int dim>
__device__ __forceinline__ void multiply(float (&X)[kBlockKeys / 2], u32 a_tile, u32 b_tile) {
  const u32 lane = lane_of_warp();
  const u32 rows = a_tile + swizzled(warp_row() + lane % 16, lane / 16);
  const u32 keys = b_tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) X[i] = 0;
  if constexpr (Type::kType == kF32) {
    const auto load = [&](int, int step, u32 (&a)[4]) {
      load_shared_matrices((rows ^ step % 4 * 32) + step / 4 * kPanelBytes, a);
    };
    return add_products_of_rows<dim>(reinterpret_cast<float (&)[1][kBlockKeys / 2]>(X), load, b_tile, kPanelBytes);
  }
#pragma unroll 4
  for (int step = 0; step < dim / 16; ++step) {
    u32 a[4];
    load_shared_matrices((rows ^ step % 4 * 32) + step / 4 * kPanelBytes, a);
#pragma unroll
    for (int key = 0; key < kBlockKeys; key += 16) {
      u32 b[4];
      load_shared_matrices((keys ^ step % 4 * 32) + step / 4 * kPanelBytes + key * kPanelRowBytes, b);
      multiply_16_8_16<Type::kType>(X + key / 2, a, b[0], b[1]);
      multiply_16_8_16<Type::kType>(X + key / 2 + 4, a, b[2], b[3]);
    }
  }
}

// Adds dS of a tile to the sums. Returns the products of Q and K in X.
__device__ __forceinline__ void add_score_tile(const BackwardParams& p, u32 smem, float (&sums)[kBlockKeys / 2],
                                               float (&X)[kBlockKeys / 2], int batch, int head, int row, int first_key,
                                               const Lengths& n) {
  float Y[kBlockKeys / 2];
  const auto wait = [] {
    async_copy_commit();
    async_copy_wait<0>();
    __syncthreads();
  };
  __syncthreads();
  start_rows<ElementQ, kHeadDim>(smem, p.q, p.d, batch, n.q_start, head, row, n.sq);
  start_rows<ElementK, kHeadDim>(smem + kLayout.keys, p.k, p.d, batch, n.k_start, head / p.group, first_key, n.sk);
  wait();
  multiply<ElementQ, kHeadDim>(X, smem, smem + kLayout.keys);
  __syncthreads();
  start_rows<ElementO, kValueDim>(smem, p.dout, p.dv, batch, n.q_start, head, row, n.sq);
  start_rows<ElementV, kValueDim>(smem + kLayout.keys, p.v, p.dv, batch, n.k_start, head / p.group, first_key, n.sk);
  wait();
  multiply<ElementO, kValueDim>(Y, smem, smem + kLayout.keys);
  Kept<kBlockKeys> kept;
  if (kDropout)
    kept = kept_scores<kBlockKeys>(p, smem + kLayout.dropout_key, dropout_head(p, batch, head), row + warp_row(),
                                   first_key);
  const ScoreHead of_head = score_head(p, n, batch, head);
  add_gradients(p, sums, X, Y, batch, head, row, first_key, n, kept,
                [&](ScoreContext at, int column, float(&of_keys)[8]) {
                  at.head = of_head;
#pragma unroll
                  for (int i = 0; i < 8; ++i)
                    of_keys[i] = bias_of(p, at.moved(i & 2 ? 8 : 0, column + i / 4 * 8 + (i & 1)));
                });
}
