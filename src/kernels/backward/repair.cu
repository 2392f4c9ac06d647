// backward/repair.cuh as a separate kernel, for calls whose dQ a kernel by rows computes; otherwise round.cu repairs.
#include "device/dependent_launch.cuh"
#include "backward/repair.cuh"

enum : int { kWarps = 8 };

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1)
    fulgur_backward_repair(const __grid_constant__ BackwardParams p) {
  wait_for_earlier_kernels();
  if (*p.not_finite == 0) return;
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const int warps = gridDim.x * kWarps;
  const long long queries = (long long)(p.batch) * p.hq * p.sq;
  for (long long i = warp; kComputesDq && i < queries; i += warps)
    repair_query(p, int(i / p.sq / p.hq), int(i / p.sq % p.hq), int(i % p.sq));
  if (kKeyGradients) repair_keys(p, warp, warps);
  forget_not_finite(p, gridDim.x);
}
