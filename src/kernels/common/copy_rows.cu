// A tensor that TMA cannot address, since its rows do not lie at multiples of 16 bytes, into one whose rows do.
#include "common/copy_rows_params.h"

extern "C" __global__ void __launch_bounds__(256) fulgur_forward_copy(const __grid_constant__ ForwardCopyParams p) {
  const long long total = p.batch * p.rows * p.heads * p.chunks;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
    const long long column = i % p.chunks * 8;
    const long long head = i / p.chunks % p.heads;
    const long long row = i / p.chunks / p.heads % p.rows;
    const long long batch = i / p.chunks / p.heads / p.rows;
    const unsigned short* from =
        static_cast<const unsigned short*>(p.from) + batch * p.batch_stride + row * p.row_stride + head * p.head_stride + column;
    unsigned x[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (column + j < p.dim) x[j / 2] |= unsigned(from[j]) << (j % 2 * 16);
    static_cast<uint4*>(p.to)[i] = {x[0], x[1], x[2], x[3]};
  }
}
