// Multiplies rows by a Hadamard matrix (fulgur/codes/hadamard.h), a warp for each head of a row. A lane has every 32nd
// column.
#include "kernel_config.h"
#include "codes/hadamard_params.h"
#include "device/quantize.cuh"

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
        float x[kLaneElements] = {};
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) {
          const int column = lane + 32 * i;
          if (column >= columns) break;
          x[i] = to_f32<kElement>(from[first + column]);
          if (!p.inverse && hadamard_flips(column)) x[i] = -x[i];
        }
        hadamard_lanes(x, columns);
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) {
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
