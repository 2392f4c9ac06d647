// Packed rows behind the last sequence belong to no block: O = 0 and LSE = -inf.
#include "forward_padding_params.h"

extern "C" __global__ void __launch_bounds__(256)
    fulgur_forward_padding(const __grid_constant__ ForwardPaddingParams p) {
  const long long first = max(p.cu_seqlens_q[p.batch], 0);  // nobody has checked it
  for (long long row = first + blockIdx.x; row < p.total_q; row += gridDim.x) {
    for (int i = threadIdx.x; i < p.hq * p.dv; i += blockDim.x)
      p.o[row * p.o_row_stride + i / p.dv * p.o_head_stride + i % p.dv] = 0;
    if (p.lse == nullptr) continue;
    for (int head = threadIdx.x; head < p.hq; head += blockDim.x)
      p.lse[head * p.lse_head_stride + row] = -__int_as_float(0x7f800000);
  }
}
