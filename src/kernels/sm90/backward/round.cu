// dQ from dq_accum: scaled, rounded, stored. As the last kernel of a call it also repairs gradients that a hidden NaN
// or infinity has reached (repair.cuh): each CTA the rows of dQ that it rounds, all CTAs dK and dV.
#include "sm90/common/fragment_store.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "sm90/backward/layout.cuh"
#include "sm90/backward/repair.cuh"
#include "sm90/backward/params.h"

enum : int { kRoundThreads = 128 * kDqPanels, kRepairs = kHidesKeys };

// A CTA takes 64 rows, a warpgroup of it one panel. Grid: (chunks of 64 rows of the longest sequence, batch * hq).
extern "C" __global__ void __launch_bounds__(kRoundThreads, 2)
    fulgur_backward_round(const __grid_constant__ BackwardParams p) {
  wait_for_earlier_kernels();
  const int panel = threadIdx.x / 128;
  const int eights = min_of(8, (p.d + 15) / 16 * 2 - 8 * panel);  // groups of 8 columns in this panel
  // The last head comes first, since L2 still holds its dq_accum.
  for (int batch_head = gridDim.y - 1 - blockIdx.y; batch_head < p.batch * p.hq; batch_head += gridDim.y) {
    const int batch = batch_head / p.hq;
    const int head = batch_head % p.hq;
    const Lengths n = lengths_of(p, batch);
    const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
    for (int first = 64 * blockIdx.x; first < n.sq; first += 64 * gridDim.x) {
      // The dQ tiles of 64 rows follow each other, one for each panel.
      const float4* accum = reinterpret_cast<const float4*>(p.dq_accum + (at + first) * (64 * kDqPanels));
      const int row = first + int(warp_row() + thread_row());
      ElementQ::Memory* dq = row_of<ElementQ>(p.dq, batch, n.q_start + row, head);
      float dQ[32] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= eights) break;
        const int place = int(threadIdx.x) % 128 / 32 * eights + j;
        const float4 x = accum[panel * (kDqTileFloats / 4) + place * 32 + threadIdx.x % 32];
        dQ[4 * j] = x.x;
        dQ[4 * j + 1] = x.y;
        dQ[4 * j + 2] = x.z;
        dQ[4 * j + 3] = x.w;
      }
      Finite<ElementQ> finite;
      store_global_fragment<ElementQ, 64, kElements>(dq + 64 * panel, p.dq.row, n.sq - row, p.d - 64 * panel, dQ,
                                                     p.scale, p.scale, finite);
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
