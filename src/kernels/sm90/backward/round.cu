// dQ from its sums: scaled, rounded, stored. And, as the last kernel of a call, what a mask hides but NaN or infinity has
// come from is repaired: rows of dQ by the CTA that has rounded them, dK and dV by all.
#include "sm90/common/fragment_store.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "sm90/backward/layout.cuh"
#include "sm90/backward/repair.cuh"
#include "sm90/backward/params.h"

enum : int { kRoundThreads = 128 * kHeadPanels, kRepairs = kHasLeft || kHasRight };

// A CTA takes 64 rows, a warpgroup a panel of their columns. Grid: (row chunks of the longest sequence,
// batch * hq).
extern "C" __global__ void __launch_bounds__(kRoundThreads, 2)
    fulgur_backward_round(const __grid_constant__ BackwardParams p) {
  wait_for_earlier_kernels();
  const int panel = threadIdx.x / 128;
  const int eights = min_of(8, (p.d + 15) / 16 * 2 - 8 * panel);  // of columns
  // The last pair first, whose sums L2 still holds.
  for (int pair = gridDim.y - 1 - blockIdx.y; pair < p.batch * p.hq; pair += gridDim.y) {
    const int batch = pair / p.hq;
    const int head = pair % p.hq;
    const Lengths n = lengths_of(p, batch);
    const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
    for (int first = 64 * blockIdx.x; first < n.sq; first += 64 * gridDim.x) {
      // Units of a tile of Br rows lie panel by panel, those of its first 64 rows before the others.
      const float4* sums = reinterpret_cast<const float4*>(p.dq_sums + (at + first) * (64 * kHeadPanels));
      const int row = first + int(warp_row() + thread_row());
      unsigned short* dq = row_of(p.dq, batch, n.q_start + row, head);
      float dQ[32] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= eights) break;
        const int place = int(threadIdx.x) % 128 / 32 * eights + j;
        const float4 x = sums[panel * (kUnitFloats / 4) + place * 32 + threadIdx.x % 32];
        dQ[4 * j] = x.x;
        dQ[4 * j + 1] = x.y;
        dQ[4 * j + 2] = x.z;
        dQ[4 * j + 3] = x.w;
      }
      Finite finite;
      store_global_fragment<64, kElements>(dq + 64 * panel, p.dq.row, n.sq - row, p.d - 64 * panel, dQ, p.scale,
                                           p.scale, finite);
      if constexpr (kRepairs)
        if (__syncthreads_or(finite.trace != 0))
          for (int i = threadIdx.x / 32; i < 64; i += kRoundThreads / 32) repair_query(p, batch, head, first + i);
    }
  }
  if constexpr (kRepairs) {
    if (*p.not_finite == 0) return;
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    const int blocks = gridDim.x * gridDim.y;
    repair_keys(p, (block * kRoundThreads + int(threadIdx.x)) / 32, blocks * (kRoundThreads / 32));
    forget_not_finite(p, blocks);
  }
}
