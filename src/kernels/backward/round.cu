// Scales, rounds and stores dQ from dq_accum. As the last kernel of a call it also repairs gradients that a hidden NaN
// or infinity has reached (repair.cuh): each CTA the rows of dQ that it rounds, and all CTAs dK and dV. Without dQ it
// only repairs.
#include "device/dependent_launch.cuh"
#include "backward/repair.cuh"
#include "backward/round.cuh"

enum : int { kRoundThreads = 128 * kDqPanels };

// A CTA computes 64 rows, each of its warpgroups one panel. Grid: (chunks of 64 rows of the longest sequence, batch *
// hq).
extern "C" __global__ void __launch_bounds__(kRoundThreads, kDqByFours && kDqPanels <= 2 ? 2 : 1)
    fulgur_backward_round(const __grid_constant__ BackwardParams p) {
  wait_for_earlier_kernels();
  const int panel = threadIdx.x / 128;
  // From the last head to the first, since L2 still holds dq_accum of the last one.
  for (int batch_head = gridDim.y - 1 - blockIdx.y; kComputesDq && batch_head < p.batch * p.hq;
       batch_head += gridDim.y) {
    const int batch = batch_head / p.hq;
    const int head = batch_head % p.hq;
    const Lengths n = lengths_of(p, batch);
    const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
    for (int first = 64 * blockIdx.x; first < n.sq; first += 64 * gridDim.x) {
      const GradientFinite<ElementQ> finite = round_rows<1>(p, n, batch, head, at, first, panel);
      if constexpr (kRepairs)
        if (__syncthreads_or(finite.trace != 0))
          for (int i = threadIdx.x / 32; i < 64; i += kRoundThreads / 32) repair_query(p, batch, head, first + i);
    }
  }
  if constexpr (kRepairs) {
    if (*p.not_finite == 0) return;
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    const int blocks = gridDim.x * gridDim.y;
    if (kKeyGradients) repair_keys(p, (block * kRoundThreads + int(threadIdx.x)) / 32, blocks * (kRoundThreads / 32));
    forget_not_finite(p, blocks);
  }
}
