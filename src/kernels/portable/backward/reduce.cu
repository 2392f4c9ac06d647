// Computes dK and dV of kv heads that have several splits: adds the partial gradients in the order of splits, scales,
// rounds and stores the sums.
#include "attention/fragment_store.cuh"
#include "device/schedule.cuh"
#include "portable/backward/partials.cuh"

enum : int {
  kReduceThreads = 256,
  kColumns = 8,  // per thread
  kOfK = kHeadDim / kColumns,
  kOfBoth = kOfK + kValueDim / kColumns,
};

// Reduces columns from `column` on of a key, to a gradient `to` with `columns` columns.
template <class Type, int dim>
__device__ __forceinline__ void reduce(const BackwardParams& p, int batch, int head, int key, int column,
                                       float* partial, const StridedTensor& to, int columns, float scale) {
  float G[kColumns] = {};
#pragma unroll 2
  for (int split = 0; split < p.splits; ++split) {
    const float* const from = partial_row<dim>(p, partial, batch, head, split, key) + column;
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + i);
      G[i] += x.x;
      G[i + 1] += x.y;
      G[i + 2] += x.z;
      G[i + 3] += x.w;
    }
  }
  const Lengths n = lengths_of(p, batch);
#pragma unroll
  for (int i = 0; kSeqUsedK && i < kColumns; ++i)
    if (key >= n.sk) G[i] = 0;
  GradientFinite<Type> finite;
  typename Type::Memory* const out = row_of<Type>(to, batch, n.k_start + key, head) + column;
  if constexpr (Type::kType == kF32) {
#pragma unroll
    for (int i = 0; i < kColumns; i += 2)
      store_global_pair(out + i, G[i] * scale, G[i + 1] * scale, columns - column - i, true, finite);
  } else {
    u32 y[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      y[i] = Type::pack(G[2 * i] * scale, G[2 * i + 1] * scale);
      finite.add(y[i]);
    }
    store_global_columns<kElements>(out, y, columns - column);
  }
  finite.report(p.not_finite);
}

// Grid: (any, batch * hk).
extern "C" __global__ void __launch_bounds__(kReduceThreads)
    fulgur_portable_reduce(const __grid_constant__ BackwardParams p) {
  const int hk = p.hq / p.group;
  for (int batch_head = blockIdx.y; batch_head < p.batch * hk; batch_head += gridDim.y) {
    const int batch = batch_head / hk;
    const int head = batch_head % hk;
    const long long parts = min(p.key_blocks.blocks * kBlockKeys, key_rows(p, batch)) * (long long)(kOfBoth);
    for (long long at = blockIdx.x * kReduceThreads + threadIdx.x; at < parts; at += gridDim.x * kReduceThreads) {
      const int key = int(at / kOfBoth);
      const int part = int(at % kOfBoth);
      if (part < kOfK) {
        reduce<ElementDk, kHeadDim>(p, batch, head, key, kColumns * part, p.partial_dk, p.dk, p.d, p.scale);
      } else {
        reduce<ElementDv, kValueDim>(p, batch, head, key, kColumns * (part - kOfK), p.partial_dv, p.dv_grad, p.dv,
                                     p.dv_scale);
      }
    }
  }
}
