// Scales, rounds and stores dQ from dq_accum.
#pragma once
#include "attention/fragment_store.cuh"
#include "device/schedule.cuh"
#include "backward/layout.cuh"

struct AddNothing {
  __device__ __forceinline__ void operator()(int, int, float (&)[32]) const {}
};

// Rounds `panels` panels, from `panel` on, of dQ of 64 rows, from `first` on, by a warpgroup, each warp of which stores
// 16 rows. The rows of the sequence and head begin at row `at` of the statistics. `add(panel, eights, dQ)` adds the
// terms that are not in dq_accum to the thread's elements of a panel with `eights` groups of 8 columns.
template <int panels, class Add = AddNothing>
__device__ __forceinline__ GradientFinite<ElementQ> round_rows(const BackwardParams& p, const Lengths& n, int batch,
                                                               int head, long long at, int first, int panel,
                                                               const Add& add = {}) {
  // The dQ tiles of 64 rows are contiguous, one for each panel.
  const float* accum = p.dq_accum + (at + first) * (64 * kDqPanels);
  const int row = first + int(warp_row() + thread_row());
  ElementQ::Memory* dq = row_of<ElementQ>(p.dq, batch, n.q_start + row, head);
  float dQ[panels][32] = {};
#pragma unroll
  for (int i = 0; i < panels; ++i) {
    const int eights = min_of(8, (p.d + 15) / 16 * 2 - 8 * (panel + i));  // groups of 8 columns in this panel
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= eights) break;
      const int place = int(threadIdx.x) % 128 / 32 * eights + j;
      if constexpr (kDqByFours != 0) {
        const float4 x = load_global_fresh4(accum + (panel + i) * kDqTileFloats + (place * 32 + threadIdx.x % 32) * 4);
        dQ[i][4 * j] = x.x;
        dQ[i][4 * j + 1] = x.y;
        dQ[i][4 * j + 2] = x.z;
        dQ[i][4 * j + 3] = x.w;
      } else {
        const float* const from = accum + (panel + i) * kDqTileFloats + place * 128 + threadIdx.x % 32;
#pragma unroll
        for (int e = 0; e < 4; ++e) dQ[i][4 * j + e] = load_global_fresh(from + 32 * e);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < panels; ++i) add(i, min_of(8, (p.d + 15) / 16 * 2 - 8 * (panel + i)), dQ[i]);
  GradientFinite<ElementQ> finite;
#pragma unroll
  for (int i = 0; i < panels; ++i)
    store_global_fragment<ElementQ, 64, kElements>(dq + 64 * (panel + i), p.dq.row, n.sq - row,
                                                   p.d - 64 * (panel + i), dQ[i], p.scale, p.scale, finite);
  return finite;
}
