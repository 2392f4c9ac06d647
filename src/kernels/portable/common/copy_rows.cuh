// Copies of rows of a tensor to panels in shared memory by cp.async.
#pragma once
#include "kernel_config.h"
#include "device/cp_async.cuh"
#include "device/mma_sync.cuh"
#include "device/operands.cuh"

// Starts the copies of thread `thread` of `threads` for a tile of `rows` rows, to the panels at `to`: eight threads
// copy 128 bytes of a row. `row_at(i)` returns the address of row i, or null if it does not exist: then it becomes 0,
// as columns from `dim` on do. `whole`: all rows exist.
template <class Type, int threads, int rows, int columns, bool whole, class RowAt>
__device__ __forceinline__ void copy_rows(u32 to, const void* any, int dim, const RowAt& row_at,
                                          u32 thread = threadIdx.x) {
  constexpr int kStep = threads / 8, kPanel = Type::kPanelColumns, kChunk = chunk_columns(Type::kType);
  static_assert(rows % kStep == 0);
  const u32 lane = lane_of_warp();
  const int first = thread / 32 * 4 + lane / 8;
  const int column = lane % 8 * kChunk;
  to += swizzled(first, lane % 8);
#pragma unroll
  for (int row = 0; row < rows; row += kStep) {
    const typename Type::Memory* from = row_at(first + row);
    const bool there = whole || from != nullptr;
    if (!there) from = static_cast<const typename Type::Memory*>(any);
#pragma unroll
    for (int panel = 0; panel < panels_of(Type::kType, columns); ++panel) {
      const int at = kPanel * panel + column;
      if (kPanel * panel + kPanel > columns && at >= columns) continue;
      const u32 place = to + panel * rows * kPanelRowBytes + row * kPanelRowBytes;
      if (whole && kWholeColumns) {
        async_copy16(place, from + at);
      } else {
        const u32 bytes = there ? bytes_of_chunk(bits_of(Type::kType), at, dim) : 0;
        async_copy16(place, bytes > 0 ? from + at : from, bytes);
      }
    }
  }
}
