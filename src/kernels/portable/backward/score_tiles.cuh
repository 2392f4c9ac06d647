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

// Copies `columns` columns from `first` on of the rows [row, row + 64) of a head, of which `count` exist; the others
// become 0.
template <class Type, int columns>
__device__ __forceinline__ void start_rows(u32 to, const StridedTensor& t, int dim, int first, int batch, int start,
                                           int head, int row, int count) {
  const typename Type::Memory* const from = row_of<Type>(t, batch, start + row, head) + first;
  copy_rows<Type, kThreads, kPortableBiasTile, columns, false>(
      to, t.data, dim - first, [&](int i) { return row + i < count ? from + i * t.row : nullptr; });
}

// X += A B^T for the warp's 16 rows.
template <class Type, int dim>
__device__ __forceinline__ void add_products(float (&X)[kBlockKeys / 2], u32 a_tile, u32 b_tile) {
  const u32 lane = lane_of_warp();
  const u32 rows = a_tile + swizzled(warp_row() + lane % 16, lane / 16);
  const u32 keys = b_tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
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

// X = A B^T for 64 rows of `a` and 64 rows of `b`, of a sequence that begins at a_start and b_start and has a_count and
// b_count rows, in steps of at most kPortableBiasColumns columns.
template <class Type, int dim>
__device__ __forceinline__ void multiply(float (&X)[kBlockKeys / 2], u32 smem, int batch, int columns,
                                         const StridedTensor& a, int a_start, int a_head, int a_row, int a_count,
                                         const StridedTensor& b, int b_start, int b_head, int b_row, int b_count) {
  constexpr int kColumns = min_of(dim, kPortableBiasColumns);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) X[i] = 0;
#pragma unroll 1
  for (int first = 0; first < dim; first += kColumns) {
    __syncthreads();
    start_rows<Type, kColumns>(smem, a, columns, first, batch, a_start, a_head, a_row, a_count);
    start_rows<Type, kColumns>(smem + kLayout.keys, b, columns, first, batch, b_start, b_head, b_row, b_count);
    async_copy_commit();
    async_copy_wait<0>();
    __syncthreads();
    add_products<Type, kColumns>(X, smem, smem + kLayout.keys);
  }
}

// Adds dS of a tile to the sums. Returns the products of Q and K in X.
__device__ __forceinline__ void add_score_tile(const BackwardParams& p, u32 smem, float (&sums)[kBlockKeys / 2],
                                               float (&X)[kBlockKeys / 2], int batch, int head, int row, int first_key,
                                               const Lengths& n) {
  float Y[kBlockKeys / 2];
  multiply<ElementQ, kHeadDim>(X, smem, batch, p.d, p.q, n.q_start, head, row, n.sq, p.k, n.k_start, head / p.group,
                               first_key, n.sk);
  multiply<ElementO, kValueDim>(Y, smem, batch, p.dv, p.dout, n.q_start, head, row, n.sq, p.v, n.k_start,
                                head / p.group, first_key, n.sk);
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
