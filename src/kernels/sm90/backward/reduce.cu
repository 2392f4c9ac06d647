// Computes dK and dV of kv heads that have several splits: adds the partial gradients in the order of splits, scales,
// rounds and stores the sums.
#include "device/dependent_launch.cuh"
#include "sm90/backward/key_partials.cuh"

enum : int {
  kReduceThreads = 2 * kBlockKeys,  // the threads that own keys in the kernel by keys
  kReduceColumns = 32,              // per CTA: few, so that also calls with few key blocks have enough CTAs
  kHeadChunks = (kHeadDim + kReduceColumns - 1) / kReduceColumns,
  kChunks = kHeadChunks + (kValueDim + kReduceColumns - 1) / kReduceColumns,
};

// Reduces kReduceColumns columns from `column` on of a gradient `to` with `columns` columns, at key block `number` of a
// kv head.
template <class Type, int dim>
__device__ __forceinline__ void reduce(const BackwardParams& p, int batch, int head, int number, int column,
                                       float* partial, StridedTensor to, int columns, float scale) {
  const int strip = threadIdx.x / 128;
  KeyBlock block = {number, head * p.splits, batch, 0};
  float G[kReduceColumns / 2];
#pragma unroll
  for (int i = 0; i < kReduceColumns / 2; ++i) G[i] = 0;
#pragma unroll 2
  for (int split = 0; split < p.splits; ++split, ++block.head) {
    const float* from = partial_of<dim>(p, partial, block, strip) + column * kBlockKeys;
#pragma unroll
    for (int i = 0; i < kReduceColumns / 2; ++i)
      if (column / 2 + i < dim / 2) G[i] += from[i * 2 * kBlockKeys];
  }
  to.data = static_cast<typename Type::Memory*>(to.data) + column;
  store_key_gradient<Type, kReduceColumns>(p, G, block, head, strip, to, columns - column, scale);
}

// Grid: (key blocks times chunks of columns, batch * hk).
extern "C" __global__ void __launch_bounds__(kReduceThreads)
    fulgur_backward_reduce(const __grid_constant__ BackwardParams p) {
  wait_for_earlier_kernels();
  const int hk = p.hq / p.group;
  for (int batch_head = blockIdx.y; batch_head < p.batch * hk; batch_head += gridDim.y)
    for (int at = blockIdx.x; at < p.key_blocks.blocks * kChunks; at += gridDim.x) {
      const int batch = batch_head / hk;
      const int head = batch_head % hk;
      const int number = at / kChunks;
      const int chunk = at % kChunks;
      if (chunk < kHeadChunks) {
        reduce<ElementDk, kHeadDim>(p, batch, head, number, kReduceColumns * chunk, p.partial_dk, p.dk, p.d, p.scale);
      } else {
        reduce<ElementDv, kValueDim>(p, batch, head, number, kReduceColumns * (chunk - kHeadChunks), p.partial_dv,
                                    p.dv_grad, p.dv, p.dv_scale);
      }
    }
}
