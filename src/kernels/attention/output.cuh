// The end of a strip's rows: LSE, and O from registers to global memory.
#pragma once
#include "attention/descale.cuh"
#include "attention/fragment_store.cuh"
#include "attention/sinks.cuh"

// How O is stored: through shared memory by TMA; from registers, 16 bytes at a time; from registers by elements.
enum Store : int { kStoreTiles, kStoreRows, kStoreElements };

__device__ __forceinline__ ElementO::Memory* output_row(const AttentionParams& p, const Place& place, const Lengths& n,
                                                      int row) {
  return row_of<ElementO>(p.o, place.batch, n.q_start + row, place.head);
}

// The normalizer with the descale of V, where the row takes a value, and with what dropout multiplies the entries that
// it keeps with.
__device__ __forceinline__ float output_scale(const AttentionParams& p, int head, float sum, float shift,
                                              float v_descale) {
  float scale = normalizer(p.sinks, head, sum, shift);
  if constexpr (kHasCodes) scale = scale == 0 ? 0 : scale * v_descale;
  return kDropout ? scale * p.keep_scale : scale;
}

__device__ __forceinline__ void store_global_lse(const AttentionParams& p, const Place& place, const Lengths& n,
                                                 int row, const Rows& rows) {
  float* lse = p.lse + place.batch * p.lse_batch_stride + place.head * p.lse_head_stride + n.q_start;
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (row + 8 * i < n.sq) lse[row + 8 * i] = lse_of(p.sinks, place.head, rows.sum[i], rows.shift[i]);
  }
}

// Stores the 16 rows of a warp from registers.
__device__ __forceinline__ void store_global_rows(const AttentionParams& p, const Place& place, const Lengths& n,
                                                  int row, const float (&O)[kValueDim / 2], float scale0,
                                                  float scale1, Finite<ElementO>& finite) {
  row += thread_row();
  constexpr bool kPermuted = ElementV::kType == kE4M3;
  store_global_fragment<ElementO, kValueDim, kStore == kStoreElements, kPermuted>(
      output_row(p, place, n, row), p.o.row, n.sq - row, p.dv, O, scale0, scale1, finite);
}
