// How a warpgroup holds a strip's accumulators: 16 rows a warp. For each 8 columns a thread holds columns 2q and 2q + 1
// (q = lane % 4) of rows r and r + 8 (r = lane / 4): x[4j], x[4j + 1] belong to row r, x[4j + 2], x[4j + 3] to row
// r + 8. Four lanes, a quad, share two rows.
#pragma once
#include "host_device/host_device.h"

// Where a thread's elements lie: of which of its two rows element i is, and in which column, from its first one on; and
// the lane and element that have another column of the thread's rows. Accumulators as above, or those of a transposed
// product, whose rows are the columns here: a thread has rows 2q and 2q + 1, and columns r + 8 n.
struct ByRows {
  static __device__ constexpr int row(int i) { return i >> 1 & 1; }
  static __device__ constexpr int column(int i) { return i / 4 * 8 + (i & 1); }
  static __device__ __forceinline__ u32 first_column() { return threadIdx.x % 4 * 2; }
  static __device__ __forceinline__ int lane_of(int column) { return int(threadIdx.x) % 32 / 4 * 4 + column % 8 / 2; }
  static __device__ __forceinline__ int element_of(int row, int column) {
    return column / 8 * 4 + 2 * row + column % 2;
  }
};
struct Transposed {
  static __device__ constexpr int row(int i) { return i & 1; }
  static __device__ constexpr int column(int i) { return i / 2 * 8; }
  static __device__ __forceinline__ u32 first_column() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int lane_of(int column) { return column % 8 * 4 + int(threadIdx.x) % 4; }
  static __device__ __forceinline__ int element_of(int row, int column) { return column / 8 * 2 + row; }
};

__device__ __forceinline__ u32 consumer() { return threadIdx.x / 128 - 1; }           // after the producer
__device__ __forceinline__ u32 warp_row() { return threadIdx.x % 128 / 32 * 16; }     // the warp's first
__device__ __forceinline__ u32 thread_row() { return threadIdx.x % 32 / 4; }          // r
__device__ __forceinline__ u32 thread_column() { return threadIdx.x % 4 * 2; }        // 2q

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}
