// Rows rotated by a Hadamard matrix (fulgur/codes/hadamard.h), a warp for each head of a row. A lane has
// every 32nd column; sums are those of the CPU, one by one.
#include "kernel_config.h"
#include "codes/hadamard_params.h"
#include "device/elements.cuh"
#include "host_device/heads.h"

enum : int { kOfLane = kMostHadamardColumns / 32 };

// H of n columns, of which this lane has x.
__device__ __forceinline__ void rotate(float (&x)[kOfLane], int n) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= n) break;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (32 * i >= n) break;
      const float other = __shfl_xor_sync(0xffffffff, x[i], step);
      x[i] = lane & step ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  }
#pragma unroll
  for (int step = 1; step < kOfLane; step *= 2) {
    if (32 * step >= n) break;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i | step];
      x[i] = __fadd_rn(a, b);
      x[i | step] = __fsub_rn(a, b);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_hadamard(const __grid_constant__ HadamardParams p) {
  using T = typename InMemory<kElement>::Type;
  const AppendRows& rows = p.rows;
  const int lane = threadIdx.x % 32;
  const int columns = hadamard_columns(rows.dim);
  const float scale = hadamard_scale(columns);
  for (long long n = blockIdx.x; n < static_cast<long long>(p.batch) * p.rows_each; n += gridDim.x) {
    const int b = static_cast<int>(n / p.rows_each), row = static_cast<int>(n % p.rows_each);
    for (int head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32; head < rows.heads;
         head += gridDim.y * (blockDim.x / 32)) {
      const T* const from =
          static_cast<const T*>(rows.from) + b * rows.from_batch + row * rows.from_row + head * rows.from_head;
      const long long to = b * rows.to_batch + row * rows.to_row + head * rows.to_head;
      for (int first = 0; first < rows.dim; first += columns) {
        float x[kOfLane] = {};
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const int column = lane + 32 * i;
          if (column >= columns) break;
          x[i] = to_f32<kElement>(from[first + column]);
          if (!p.inverse && hadamard_flips(column)) x[i] = -x[i];
        }
        rotate(x, columns);
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const int column = lane + 32 * i;
          if (column >= columns) break;
          const float y = __fmul_rn(p.inverse && hadamard_flips(column) ? -x[i] : x[i], scale);
          if (p.to_f32)
            static_cast<float*>(rows.to)[to + first + column] = y;
          else
            static_cast<T*>(rows.to)[to + first + column] = from_f32<kElement>(y);
        }
      }
    }
  }
}
