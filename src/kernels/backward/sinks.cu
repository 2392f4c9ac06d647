// The gradient of the sinks. A sink is a key without a value, so that dsink = sum of P_sink (dLSE - D) over the rows of
// its head in all sequences. prepare.cu computes dLSE - D of each row.
#include "device/dependent_launch.cuh"
#include "device/elements.cuh"
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "backward/params.h"

enum : int { kSinksThreads = 1024, kSinksWarps = kSinksThreads / 32 };

// P of a sink in a row, whose LSE includes it: 1 if both are +inf, 0 if either is -inf.
__device__ __forceinline__ float sink_probability(float sink, float lse) {
  if (lse == -infinity()) return 0;
  return sink == lse ? 1 : exp2_fast((sink - lse) * 1.4426950408889634f);
}

// A CTA computes a head, each of its warps kStatisticsRows rows of a sequence at a time. Sums are f64, in an order that
// depends only on the lengths. Grid: hq.
extern "C" __global__ void __launch_bounds__(kSinksThreads)
    fulgur_backward_sinks(const __grid_constant__ BackwardParams p) {
  __shared__ double sums[kSinksThreads];
  wait_for_earlier_kernels();
  const int head = blockIdx.x;
  const float sink = element_at(p.sinks.data, p.sinks.type, head);
  const int chunks = count_of(p.sq, kStatisticsRows);
  double sum = 0;
  for (long long at = threadIdx.x / 32; at < (long long)(p.batch) * chunks; at += kSinksWarps) {
    const int batch = int(at / chunks);
    const int first = int(at % chunks) * kStatisticsRows;
    const Lengths n = lengths_of(p, batch);
    const float* lse = p.lse.data + batch * p.lse.batch + head * p.lse.head + n.q_start;
    const float* delta = p.delta + head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
#pragma unroll
    for (int i = 0; i < kStatisticsRows / 32; ++i) {
      const int row = first + 32 * i + int(threadIdx.x % 32);
      const float probability = row < n.sq ? sink_probability(sink, lse[row]) : 0;
      if (probability != 0) sum += double(probability) * delta[row];
    }
  }
  sums[threadIdx.x] = sum;
  for (int step = kSinksThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) set_element(p.dsinks, p.dsinks_type, head, float(sums[0]));
}
