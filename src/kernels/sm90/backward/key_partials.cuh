// dK and dV of a key block as the accumulators of a warpgroup: their first values, and their stores. After all rows of
// all q heads of the group they are the gradients. Partial dK and dV are stored to the workspace in f32: for the next
// wave, for the CTA that computes the second part of a cut block, or for reduce.cu.
#pragma once
#include "attention/fragment_store.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "device/semaphore.cuh"
#include "sm90/backward/layout.cuh"

// The address of a thread's partial gradient, whose elements are 2 * kBlockKeys floats apart. `strip` counts the
// block's keys by 64.
template <int dim>
__device__ __forceinline__ float* partial_of(const BackwardParams& p, float* partial, const KeyBlock& block,
                                             int strip) {
  const long long batch_head = (long long)(block.batch) * (p.hq / p.group * p.splits) + block.head;
  const long long place = (batch_head - p.first_partial) * p.key_blocks.blocks + block.block;
  return partial + place * (kBlockKeys * dim) + strip * 128 + threadIdx.x % 128;
}

// Sets G to 0, or loads a stored partial gradient.
template <int dim>
__device__ __forceinline__ void begin_gradient(const BackwardParams& p, float (&G)[dim / 2], const KeyBlock& block,
                                               int strip, float* partial) {
  const float* from = partial_of<dim>(p, partial, block, strip);
  if (kKeyGradients && block.state & kLoadsPartial) {
    wait_for_earlier_kernels();
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) G[i] = from[i * 2 * kBlockKeys];
  } else {
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) G[i] = 0;
  }
}

// Stores a complete G as rows of a gradient `to` with `columns` columns, at a kv head. Rows after the last key are 0,
// which 0 times NaN of a query is not. Returns whether all elements of the thread are finite; without kRoundsDq sets a
// flag for a later kernel if they are not.
template <class Type, int dim>
__device__ __forceinline__ bool store_key_gradient(const BackwardParams& p, float (&G)[dim / 2], const KeyBlock& block,
                                                   int head, int strip, const StridedTensor& to, int columns,
                                                   float scale) {
  GradientFinite<Type> finite;
  const int key = block.block * kBlockKeys + 64 * strip + warp_row() + thread_row();
  const int rows = key_rows(p, block.batch) - key;
  const Lengths n = lengths_of(p, block.batch);
  if (kSeqUsedK) clear_rows_after(G, n.sk - key);
  typename Type::Memory* row = row_of<Type>(to, block.batch, n.k_start + key, head);
  store_global_fragment<Type, dim, kElements>(row, to.row, rows, columns, G, scale, scale, finite);
  if (!kRoundsDq) finite.report(p.not_finite);
  return finite.trace == 0;
}

// Stores G as a partial gradient or as the gradient, by the state of the block. Returns as store_key_gradient.
template <class Type, int dim>
__device__ __forceinline__ bool end_gradient(const BackwardParams& p, float (&G)[dim / 2], const KeyBlock& block,
                                             int strip, float* partial, const StridedTensor& to, int columns,
                                             float scale) {
  if (!kKeyGradients) return true;
  if (!kRoundsDq && block.state & kStoresPartial) {
    float* const store = partial_of<dim>(p, partial, block, strip);
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) store[i * 2 * kBlockKeys] = G[i];
    return true;
  }
  return store_key_gradient<Type, dim>(p, G, block, block.head, strip, to, columns, scale);
}

// The number of warps that store partial gradients of first parts.
__device__ __forceinline__ int warps_of_first_parts(const BackwardParams& p) { return 4 * kConsumers * p.cut_blocks; }

// Counts this warp after it has stored the partial gradients of a first part.
__device__ __forceinline__ void arrive_first_part(const BackwardParams& p) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) take_ticket(p.first_parts, warps_of_first_parts(p));
}

// Waits until all warps are counted. There is no deadlock: CTAs take first parts before all other work tiles, so that
// running CTAs have all of them, and a CTA stores the partial gradients of its own first part before it waits. With a
// map, by which second parts may have no steps, a CTA may wait here again.
__device__ __forceinline__ void wait_for_first_parts(const BackwardParams& p) {
  if (!kMapsTiles || look_acquire(p.first_parts) < warps_of_first_parts(p)) {
    while (load_acquire(p.first_parts) < warps_of_first_parts(p)) {
    }
  }
  __syncwarp();
}
