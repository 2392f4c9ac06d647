// Adds sums of f32 of several processes, and rounds the last sum to the type of a gradient. A warp computes a row of a
// head.
#include "backward/add_rows_params.h"
#include "device/elements.cuh"

// The address of a row of a head.
__device__ __forceinline__ void* row_of(const AddedRows& t, long long batch, long long row, long long head) {
  return static_cast<char*>(t.data) + (batch * t.batch + row * t.row + head * t.head) * bytes_of(t.type);
}

extern "C" __global__ void __launch_bounds__(kAddRowsThreads) fulgur_add_rows(const __grid_constant__ AddRowsParams p) {
  constexpr int kWarps = kAddRowsThreads / 32, kColumns = 4;  // kColumns: of a thread at a time
  const long long count = p.batches * p.rows * p.heads;
  for (long long i = blockIdx.x * kWarps + threadIdx.x / 32; i < count; i += (long long)(gridDim.x) * kWarps) {
    const long long head = i % p.heads;
    const long long row = i / p.heads % p.rows;
    const long long batch = i / p.heads / p.rows;
    const void* const from = row_of(p.from, batch, row, head);
    const void* const with = row_of(p.with, batch, row, head);
    void* const to = row_of(p.to, batch, row, head);
    for (int first = threadIdx.x % 32; first < p.dim; first += 32 * kColumns) {
      float x[kColumns], y[kColumns];  // all are read before any is written
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        if (first + 32 * n < p.dim) x[n] = element_at(from, p.from.type, first + 32 * n);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        if (p.adds && first + 32 * n < p.dim) y[n] = element_at(with, p.with.type, first + 32 * n);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        if (first + 32 * n < p.dim) set_element(to, p.to.type, first + 32 * n, p.adds ? x[n] + y[n] : x[n]);
    }
  }
}
