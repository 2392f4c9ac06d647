// Converts a tensor of e4m3 or e5m2 (kFrom) to f16, which has each of their numbers, for products with P of 16 bits.
// The rows of the result are aligned to 16 bytes, as those of copy_rows.cu.
#include "kernel_config.h"
#include "common/copy_rows_params.h"
#include "device/codes.cuh"

enum : int { kThreads = 256, kRowsAhead = 4 };  // a thread converts 8 columns of 4 rows at a time

__device__ __forceinline__ const unsigned char* head_of_row(const ForwardCopyParams& p, long long row, int head) {
  const long long batch = row / p.rows;
  return static_cast<const unsigned char*>(p.from) + batch * p.batch_stride + (row - batch * p.rows) * p.row_stride +
         head * p.head_stride;
}

// A CTA converts several narrow rows at a time; of wide rows a thread has several units of 8 columns.
extern "C" __global__ void __launch_bounds__(kThreads)
    fulgur_forward_widen(const __grid_constant__ ForwardCopyParams p) {
  const u32 chunks = u32(p.chunks);
  const u32 units = u32(p.heads) * chunks;
  const u32 threads_of_row = units < kThreads ? units : kThreads;
  const u32 rows_at_once = kThreads / threads_of_row;
  const u32 mine = threadIdx.x / threads_of_row;
  if (mine >= rows_at_once) return;
  const long long strides = p.batch_stride | p.row_stride | p.head_stride | reinterpret_cast<long long>(p.from);
  const bool aligned = p.column_stride == 1 && strides % kLoadedCodes == 0;
  const long long rows = p.batch * p.rows;
  const long long step = (long long)(gridDim.x) * rows_at_once;
  for (long long first = (long long)(blockIdx.x) * rows_at_once + mine; first < rows; first += kRowsAhead * step)
    for (u32 unit = threadIdx.x % threads_of_row; unit < units; unit += threads_of_row) {
      const u32 head = unit / chunks;
      const int column = int(unit - head * chunks) * kLoadedCodes;
      uint2 codes[kRowsAhead];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i)
        if (first + i * step < rows)
          codes[i] = load_codes(head_of_row(p, first + i * step, int(head)) + column * p.column_stride, p.dim - column,
                                p.column_stride, aligned);
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i)
        if (first + i * step < rows)
          static_cast<uint4*>(p.to)[(first + i * step) * units + unit] = {
              code_pair<Element(kFrom)>(codes[i], 0), code_pair<Element(kFrom)>(codes[i], 1),
              code_pair<Element(kFrom)>(codes[i], 2), code_pair<Element(kFrom)>(codes[i], 3)};
    }
}
