// dK and dV of a block of keys as the sums that threads hold: where they begin, and where they go. They are the
// gradient once all rows and all q heads of the group have been met; until then they wait in memory, for the next wave
// or for backward_join.cu.
#pragma once
#include "shared/fragment_store.cuh"
#include "shared/schedule.cuh"
#include "sm90/backward_layout.cuh"

// Where the sums of a thread wait, 2 * kBlockKeys floats apart. `strip` counts the block's keys by 64.
template <int dim>
__device__ __forceinline__ float* carry_of(const BackwardParams& p, float* carry, const KeyBlock& block, int strip) {
  const long long pair = (long long)(block.batch) * (p.hq / p.group * p.parts) + block.head;
  return carry + (pair * p.key_blocks.blocks + block.block) * (kBlockKeys * dim) + strip * 128 + threadIdx.x % 128;
}

template <int dim>
__device__ __forceinline__ void begin_sums(const BackwardParams& p, float (&G)[dim / 2], const KeyBlock& block,
                                           int strip, float* carry) {
  const float* from = carry_of<dim>(p, carry, block, strip);
  if (block.state & kCarryIn) {
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) G[i] = from[i * 2 * kBlockKeys];
  } else {
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) G[i] = 0;
  }
}

// The sums are those of a gradient `to` at `head` of k, which has `columns`.
template <int dim>
__device__ __forceinline__ void store_key_gradient(const BackwardParams& p, const float (&G)[dim / 2],
                                                   const KeyBlock& block, int head, int strip, const StridedTensor& to,
                                                   int columns, float scale) {
  Finite finite;
  const int key = block.block * kBlockKeys + 64 * strip + warp_row() + thread_row();
  const int rows = key_rows(p, block.batch) - key;
  unsigned short* row = row_of(to, block.batch, lengths_of(p, block.batch).k_start + key, head);
  store_global_fragment<dim, kElements>(row, to.row, rows, columns, G, scale, scale, finite);
  finite.report(p.not_finite);
}

// The sums are those of a gradient, or wait.
template <int dim>
__device__ __forceinline__ void end_sums(const BackwardParams& p, const float (&G)[dim / 2], const KeyBlock& block,
                                         int strip, float* carry, const StridedTensor& to, int columns, float scale) {
  if (block.state & kCarryOut) {
    float* const wait = carry_of<dim>(p, carry, block, strip);
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) wait[i * 2 * kBlockKeys] = G[i];
  } else {
    store_key_gradient<dim>(p, G, block, block.head, strip, to, columns, scale);
  }
}
