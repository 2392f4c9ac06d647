// Loads rows of a sequence to shared memory, without rows of its neighbours.
#pragma once
#include "sm90/ptx/mbarrier.cuh"
#include "device/memory.cuh"
#include "host_device/element.h"
#include "sm90/ptx/tma.cuh"

// The rows of a head of a sequence: the index of the first one in the tensor, and their number.
struct Source {
  int first, count;
  int head, batch;
};

// Fills a buffer of panels of `rows` rows, of elements of `type`, from panel `first` and a sequence's `row` on. Rows
// after its end that TMA does not set to 0, as they are a neighbour's or padding, are cleared: they are multiplied with
// P = 0 or dS = 0, and 0 * NaN is NaN. `tail` is a barrier that only this warp uses. Expects the bytes at the barrier
// `full`, unless it returns true: then the caller must arrive there.
template <Element type, int panels, int rows, int first = 0>
__device__ __forceinline__ bool load_rows(u32 buffer, const void* map, u32 full, u32 tail, u32& tail_parity,
                                          const Source& source, int row, bool may_clear, Keep keep) {
  const int valid = source.count - row;
  const bool clear = may_clear && valid < rows;
  const u32 landed = clear ? tail : full;
  if (elect_one()) {
    mbarrier_arrive_expect(landed, panels * rows * kPanelRowBytes);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
#pragma unroll
      for (int box = 0; box < rows; box += 64)
        tma_load(buffer + (panel * rows + box) * kPanelRowBytes, map, landed,
                 {panel_columns(type) * (first + panel), source.first + row + box, source.head, source.batch}, keep);
  }
  if (!clear) return false;
  const u32 lane = lane_of_warp();
  mbarrier_wait(landed, tail_parity);
  tail_parity ^= 1;
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll 1
    for (int at = max(valid, 0) * kPanelRowBytes + 16 * lane; at < rows * kPanelRowBytes; at += 512)
      store_shared_zero16(buffer + panel * rows * kPanelRowBytes + at);
  fence_async_proxy();
  __syncwarp();
  return true;
}
