// dK and dV where several pairs share a head of k and v: the sums that these have left, added in their order, scaled,
// rounded, stored.
#include "device/dependent_launch.cuh"
#include "sm90/backward/key_partials.cuh"

enum : int {
  kJoinThreads = 2 * kBlockKeys,  // those that own keys in the kernel by keys
  kJoinColumns = 32,              // of a CTA, so that few blocks of keys fill the card, too
  kHeadChunks = (kHeadDim + kJoinColumns - 1) / kJoinColumns,
  kChunks = kHeadChunks + (kValueDim + kJoinColumns - 1) / kJoinColumns,
};

// Columns from `column` on of a gradient `to`, which has `columns`, at a block of keys of `head` of k.
template <int dim>
__device__ __forceinline__ void join(const BackwardParams& p, int batch, int head, int number, int column, float* carry,
                                     StridedTensor to, int columns, float scale) {
  const int strip = threadIdx.x / 128;
  KeyBlock block = {number, head * p.parts, batch, 0};
  float G[kJoinColumns / 2];
#pragma unroll
  for (int i = 0; i < kJoinColumns / 2; ++i) G[i] = 0;
#pragma unroll 2
  for (int part = 0; part < p.parts; ++part, ++block.head) {
    const float* from = carry_of<dim>(p, carry, block, strip) + column * kBlockKeys;
#pragma unroll
    for (int i = 0; i < kJoinColumns / 2; ++i)
      if (column / 2 + i < dim / 2) G[i] += from[i * 2 * kBlockKeys];
  }
  to.data += column;
  store_key_gradient<kJoinColumns>(p, G, block, head, strip, to, columns - column, scale);
}

// Grid: (blocks of keys times chunks of columns, batch * hk).
extern "C" __global__ void __launch_bounds__(kJoinThreads)
    fulgur_backward_join(const __grid_constant__ BackwardParams p) {
  wait_for_earlier_kernels();
  const int hk = p.hq / p.group;
  for (int pair = blockIdx.y; pair < p.batch * hk; pair += gridDim.y)
    for (int at = blockIdx.x; at < p.key_blocks.blocks * kChunks; at += gridDim.x) {
      const int number = at / kChunks;
      const int chunk = at % kChunks;
      if (chunk < kHeadChunks) {
        join<kHeadDim>(p, pair / hk, pair % hk, number, kJoinColumns * chunk, p.carry_dk, p.dk, p.d, p.scale);
      } else {
        join<kValueDim>(p, pair / hk, pair % hk, number, kJoinColumns * (chunk - kHeadChunks), p.carry_dv, p.dv_grad,
                        p.dv, p.dv_scale);
      }
    }
}
