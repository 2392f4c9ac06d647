// Writes O = 0 and LSE = -inf for rows that belong to no sequence: packed rows before the first sequence and after the
// last one, and queries beyond seqused_q.
#include "common/padding_params.h"
#include "device/lengths.cuh"

// O = 0 for the row at `row` elements of o. T is an unsigned integer with the size of an element.
template <class T>
__device__ __forceinline__ void clear_row(const ForwardPaddingParams& p, long long row) {
  for (int i = threadIdx.x; i < p.hq * p.dv; i += blockDim.x)
    static_cast<T*>(p.o)[row + i / p.dv * p.o_head_stride + i % p.dv] = 0;
}

__device__ __forceinline__ void write_rows(const ForwardPaddingParams& p, int batch, long long first, long long end) {
  float* lse = p.lse + batch * p.lse_batch_stride;
  for (long long row = first + blockIdx.x; row < end; row += gridDim.x) {
    const long long at = batch * p.o_batch_stride + row * p.o_row_stride;
    switch (p.element_bytes) {
      case 1: clear_row<unsigned char>(p, at); break;
      case 2: clear_row<unsigned short>(p, at); break;
      default: clear_row<unsigned>(p, at);
    }
    if (p.lse == nullptr) continue;
    for (int head = threadIdx.x; head < p.hq; head += blockDim.x)
      lse[head * p.lse_head_stride + row] = -__int_as_float(0x7f800000);
  }
}

// Grid: (rows, sequences), or less.
extern "C" __global__ void __launch_bounds__(256)
    fulgur_forward_padding(const __grid_constant__ ForwardPaddingParams p) {
  if (p.cu_seqlens_q != nullptr && blockIdx.y == 0) {
    write_rows(p, 0, 0, min(p.cu_seqlens_q[0], p.total_q));
    write_rows(p, 0, max(p.cu_seqlens_q[p.batch], 0), p.total_q);
  }
  if (p.seqused_q == nullptr) return;
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    int start = 0;
    int count = p.sq;
    if (p.cu_seqlens_q != nullptr) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, start, count);
    write_rows(p, batch, start + used_rows(p.seqused_q, batch, count), start + count);
  }
}
