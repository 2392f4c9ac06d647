// The end of a q tile on Hopper: O through shared memory by TMA, or from registers.
#pragma once
#include "attention/repair.cuh"
#include "sm90/common/split.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"

// Packs the warp's 16 rows of O into shared memory, swizzled, and lets TMA store them.
__device__ __forceinline__ void store_shared_and_global(const ForwardParams& p, const Place& place, const Lengths& n,
                                                        int row, float (&O)[kValueDim / 2], float scale0, float scale1,
                                                        u32 shared, Finite<ElementO>& finite) {
  const u32 lane = threadIdx.x % 32;
  const u32 address = shared + lane % 16 * kPanelRowBytes;
  const u32 swizzle = lane % 8;
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i += 8) {  // 16 columns
    const u32 chunk = (i / 4 + lane / 16) % 8;
    const u32 x[4] = {ElementO::pack(O[i] * scale0, O[i + 1] * scale0),
                      ElementO::pack(O[i + 2] * scale1, O[i + 3] * scale1),
                      ElementO::pack(O[i + 4] * scale0, O[i + 5] * scale0),
                      ElementO::pack(O[i + 6] * scale1, O[i + 7] * scale1)};
    finite.add(x[0]);
    finite.add(x[2]);
    store_shared_matrices(address + i / 32 * kStripPanelBytes + ((chunk ^ swizzle) << 4), x);
  }
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
#pragma unroll
    for (int panel = 0; panel < kOPanels; ++panel)
      tma_store(&p.o_map, shared + panel * kStripPanelBytes,
                {ElementO::kPanelColumns * panel, n.q_start + row, place.head, kPacked ? 0 : place.batch});
    tma_store_commit();
  }
}

// Stores O through the shared memory of this warp's rows of Q; from registers where the plan says so, and where a store
// of 16 rows would overwrite the next packed sequence. False when the rows are not all finite.
__device__ __forceinline__ bool write_output(const ForwardParams& p, const Place& place, const Lengths& n, int row,
                                             float (&O)[kValueDim / 2], const Rows& rows, float v_descale,
                                             u32 shared) {
  const float scale0 = output_scale(p, place.head, rows.sum[0], rows.shift[0], v_descale);
  const float scale1 = output_scale(p, place.head, rows.sum[1], rows.shift[1], v_descale);
  Finite<ElementO> finite;
  if (kStore != kStoreTiles || (kPacked && row + 16 > n.sq))
    store_global_rows(p, place, n, row, O, scale0, scale1, finite);
  else
    store_shared_and_global(p, place, n, row, O, scale0, scale1, shared, finite);
  return finite.trace == 0;
}

// Writes this warp's 16 rows; `shared` is where its warpgroup's Q was.
__device__ __forceinline__ void finish(const ForwardParams& p, const Place& place, const Rows& rows,
                                       float (&O)[kValueDim / 2], float v_descale, u32 shared) {
  const Lengths n = lengths_of(p, place.batch);
  // Uniform, so that all lanes of a warp take the same branch: otherwise the votes and elections in it would take the
  // uniform registers of the main loop.
  const int row = uniform(place.row + int(warp_row()));
  if (row >= n.sq) return;
  const bool finite = write_output(p, place, n, row, O, rows, v_descale, shared + warp_row() * kPanelRowBytes);
  if (kHasLse) store_global_lse(p, place, n, row + thread_row(), rows);
  if (kHidesKeys && __any_sync(0xffffffff, !finite)) {
    tma_store_wait();
    const KeyTiles touched =
        key_tiles(band_of(p), n, kBlockKeys, place.row, min(place.row + kStripRows, n.sq) - 1);
    repair_rows(p, place, n, row, touched, rows);
  }
}
