// The gradient of a tensor that score_mod indexes, from the sums of its elements (portable/backward).
#include "backward/expression_round_params.h"
#include "device/elements.cuh"
#include "device/math.cuh"

extern "C" __global__ void __launch_bounds__(256)
    fulgur_expression_round(const __grid_constant__ ExpressionRoundParams p) {
  const double unit = unit_of(*p.sums.largest, p.log_scores);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) {
    long long at = 0;
    int rest = i;
    for (int d = kMaxExpressionRank - 1; d >= 0; --d) {
      at += rest % p.shape[d] * p.stride[d];
      rest /= p.shape[d];
    }
    const float x = p.sums.spoiled[i] ? __int_as_float(0x7fc00000) : float(double(p.sums.sums[i]) / unit);
    if (p.type == kF64) static_cast<double*>(p.data)[at] = x;
    else if (p.type == kF32) static_cast<float*>(p.data)[at] = x;
    else static_cast<unsigned short*>(p.data)[at] = p.type == kBF16 ? from_f32<kBF16>(x) : from_f32<kF16>(x);
  }
}
