// dK and dV of a block of keys as the sums that threads hold: where they begin, and where they go. They are the
// gradient once all rows and all q heads of the group have been met; until then they wait in memory, for the next wave,
// for the CTA that takes the other part of the rows, or for sm90/backward/reduce.cu.
#pragma once
#include "sm90/common/fragment_store.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "device/semaphore.cuh"
#include "sm90/backward/layout.cuh"

// Where the sums of a thread wait, 2 * kBlockKeys floats apart. `strip` counts the block's keys by 64.
template <int dim>
__device__ __forceinline__ float* carry_of(const BackwardParams& p, float* carry, const KeyBlock& block, int strip) {
  const long long pair = (long long)(block.batch) * (p.hq / p.group * p.parts) + block.head;
  const long long place = (pair - p.first_carry) * p.key_blocks.blocks + block.block;
  return carry + place * (kBlockKeys * dim) + strip * 128 + threadIdx.x % 128;
}

template <int dim>
__device__ __forceinline__ void begin_sums(const BackwardParams& p, float (&G)[dim / 2], const KeyBlock& block,
                                           int strip, float* carry) {
  const float* from = carry_of<dim>(p, carry, block, strip);
  if (block.state & kCarryIn) {
    wait_for_earlier_kernels();
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

// Warps that leave sums of first parts.
__device__ __forceinline__ int warps_of_first_parts(const BackwardParams& p) { return 4 * kConsumers * p.cut_blocks; }

// This warp's are there.
__device__ __forceinline__ void leave_first_part(const BackwardParams& p) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) take_ticket(p.first_parts, warps_of_first_parts(p));
}

// Waits until all are. CTAs that run have taken the first parts, this one among them: what it has of them it
// has left before its consumers come here, and its producer waits for nobody else.
__device__ __forceinline__ void wait_for_first_parts(const BackwardParams& p) {
  while (load_turn(p.first_parts) < warps_of_first_parts(p)) {
  }
  __syncwarp();
}
