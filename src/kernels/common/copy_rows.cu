// Copies a tensor that TMA cannot address, since its rows are not aligned to 16 bytes, to one with aligned rows.
#include "common/copy_rows_params.h"

// T is an unsigned integer with the size of an element.
template <class T>
__device__ void copy_rows(const ForwardCopyParams& p) {
  constexpr int kColumns = 16 / sizeof(T);
  struct alignas(16) Chunk {
    T x[kColumns];
  };
  const long long total = p.batch * p.rows * p.heads * p.chunks;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
    const long long column = i % p.chunks * kColumns;
    const long long head = i / p.chunks % p.heads;
    const long long row = i / p.chunks / p.heads % p.rows;
    const long long batch = i / p.chunks / p.heads / p.rows;
    const T* from = static_cast<const T*>(p.from) + batch * p.batch_stride + row * p.row_stride +
                    head * p.head_stride + column * p.column_stride;
    Chunk chunk = {};
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if (column + j < p.dim) chunk.x[j] = from[j * p.column_stride];
    static_cast<Chunk*>(p.to)[i] = chunk;
  }
}

extern "C" __global__ void __launch_bounds__(256) fulgur_forward_copy(const __grid_constant__ ForwardCopyParams p) {
  switch (p.element_bytes) {
    case 1: return copy_rows<unsigned char>(p);
    case 2: return copy_rows<unsigned short>(p);
    default: return copy_rows<unsigned>(p);
  }
}
