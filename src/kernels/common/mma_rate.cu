// Measures the rate of mma.sync of an SM, by which models of a compute capability differ by a factor of 2.
#include "common/mma_rate_params.h"
#include "device/mma_sync.cuh"

extern "C" __global__ void __launch_bounds__(32 * kMmaRateWarps)
    fulgur_mma_rate(const __grid_constant__ MmaRateParams p) {
  float sums[kMmaRateChains][4] = {};
  const u32 a[4] = {threadIdx.x, threadIdx.x, threadIdx.x, threadIdx.x};
  __syncthreads();
  const long long start = clock64();
#pragma unroll 1
  for (int i = 0; i < p.rounds; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaRateChains; ++j) multiply_16_8_16<kF16>(sums[j], a, a[0], a[1]);
  }
  __syncthreads();
  const long long cycles = clock64() - start;
  float sum = 0;  // keeps the compiler from removing the products
#pragma unroll
  for (int j = 0; j < kMmaRateChains; ++j) sum += sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3];
  if (threadIdx.x == 0 || sum == -1) *p.cycles = cycles;
}
