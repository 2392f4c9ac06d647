// Stores of the gradient of a CTA's rows or keys from the fragments of its warps.
#pragma once
#include "portable/backward/partials.cuh"
#include "portable/wide_backward/products.cuh"

// The thread's first row of the CTA's, in tile `t` of its warp; its first column of those that the warp has of a panel.
__device__ __forceinline__ int own_row(int t) {
  return (int(threadIdx.x / 128) * kOwnTiles + t) * 16 + int(thread_row());
}
__device__ __forceinline__ int warp_column() { return int(threadIdx.x / 32 % 4) * 16; }

// Stores rows r and r + 8 of a tile. `rows`: how many exist from r on; `dims`: columns.
template <class Type>
__device__ __forceinline__ void store_tile(const Gradient& G, int t, typename Type::Memory* out, long long row_stride,
                                           int rows, int dims, float scale, GradientFinite<Type>& finite) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int panel = 0; panel < kGradientPanels; panel += Type::kType == kF32 ? 1 : 2)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = rows > 8 * half;
      if constexpr (Type::kType == kF32) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = kPanelColumns * panel + warp_column() + 8 * j + 2 * quad;
          const float* const x = G[panel][t] + 4 * j + 2 * half;
          store_global_pair(out + 8 * half * row_stride + column, x[0] * scale, x[1] * scale, there ? dims - column : 0,
                            true, finite);
        }
      } else {
        u32 y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool exists = panel + j / 2 < kGradientPanels;
          const float* const x = G[exists ? panel + j / 2 : 0][t] + 4 * (j % 2) + 2 * half;
          y[j] = exists ? Type::pack(x[0] * scale, x[1] * scale) : 0;
          finite.add(y[j]);
        }
        quad_transpose(y);
        const int column = kPanelColumns * (panel + quad / 2) + warp_column() + quad % 2 * 8;
        store_global_columns<kElements>(out + 8 * half * row_stride + column, y, there ? dims - column : 0);
      }
    }
}

// Stores the gradient, of which `rows` rows exist from the CTA's first one on.
template <class Type>
__device__ __forceinline__ void store_gradient(const BackwardParams& p, const Own& own, Gradient& G,
                                               const StridedTensor& to, int start, int rows, int dims, float scale) {
  GradientFinite<Type> finite;
#pragma unroll
  for (int t = 0; t < kOwnTiles; ++t) {
    const int row = own_row(t);
    if (kSeqUsedK && !kOfQ) {
#pragma unroll
      for (int panel = 0; panel < kGradientPanels; ++panel)
        clear_rows_after(G[panel][t], own.n.sk - own.first() - row);
    }
    store_tile<Type>(G, t, row_of<Type>(to, own.batch, start + own.first() + row, own.head), to.row, rows - row, dims,
                     scale, finite);
  }
  finite.report(p.not_finite);
}

// Stores the gradient of a split of a kv head in f32; portable/backward/reduce.cu adds the splits.
__device__ __forceinline__ void store_partial(const BackwardParams& p, const Own& own, const Gradient& G,
                                              float* partial) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int t = 0; t < kOwnTiles; ++t) {
    float* const row =
        partial_row<kGradientDim>(p, partial, own.batch, own.head, own.split, own.first() + own_row(t));
#pragma unroll
    for (int panel = 0; panel < kGradientPanels; ++panel)
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int column = kPanelColumns * panel + warp_column() + i / 4 * 8 + 2 * quad;
        float* const to = row + i / 2 % 2 * 8 * kGradientDim + column;
        if (column < kGradientDim) *reinterpret_cast<float2*>(to) = {G[panel][t][i], G[panel][t][i + 1]};
      }
  }
}
