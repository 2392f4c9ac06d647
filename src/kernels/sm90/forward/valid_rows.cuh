// Rows of a strip after the end of its sequence: in Q and in a dense bias they may be the next sequence's, or padding.
// They become what TMA gives where a tensor ends. The lazy rescale votes over the rows of a warp, so the bits of a row
// depend on the other rows of its warp, and must depend on nothing but where the sequence ends.
#pragma once
#include "attention/bias_tile.cuh"
#include "sm90/common/work_tiles.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"

// How many rows of its sequence begin with the strip: maybe more than it has.
__device__ __forceinline__ int valid_rows(const ForwardParams& p, const KeyWalk& walk, u32 view) {
  if (!kTopLeft && !kPart) return walk.sk - walk.diagonal;
  const Place place = load_place(view);
  return lengths_of(p, place.batch).sq - place.row;
}

// Clears the bias of 16 columns, as load_bias_of_strip() returns it, in rows after the end of the sequence.
__device__ __forceinline__ void clear_bias_after_sequence(const ForwardParams& p, const KeyWalk& walk, u32 view,
                                                          float (&bias)[8]) {
  const int valid = valid_rows(p, walk, view);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (int(warp_row() + thread_row()) + i / 2 % 2 * 8 >= valid) bias[i] = kBias == 1 + kBool ? -infinity() : 0;
}

// Clears the rows of Q in shared memory after the end of the sequence; the strip's warpgroup does.
__device__ __forceinline__ void clear_rows_after_sequence(const ForwardParams& p, const KeyWalk& walk, u32 view,
                                                          u32 strip, u32 barrier) {
  if (!walk.more()) return;
  int valid = valid_rows(p, walk, view);
  if (kMapsTiles) valid = max(valid, 0);  // strips that do not exist walk, too
  if (valid >= kStripRows) return;
  for (int panel = 0; panel < kQPanels; ++panel)
    for (int at = valid * kPanelRowBytes + 16 * int(threadIdx.x % 128); at < kStripPanelBytes; at += 16 * 128)
      store_shared_zero16(strip + panel * kStripPanelBytes + at);
  fence_async_proxy();
  named_barrier_sync(barrier, 128);
}
