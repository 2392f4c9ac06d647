// A row of S, P or dP in memory, which the lanes of a warp read and write 8 elements at a time.
#pragma once
#include "device/math.cuh"
#include "device/operands.cuh"
#include "device/warp.cuh"
#include "papers/standard_params.h"

enum : int { kRowsOfCta = 8, kOfLane = 8 };
using Memory = ElementQ::Memory;
using Chunk = Pack<Memory, kOfLane>;   // of P and dP
using Scores = Pack<float, kOfLane>;  // of S

// Calls body(first) for the first elements of this lane's chunks of a row of `count` elements, which begins with all
// lanes together; those of the last ones may be after the end.
template <class Body>
__device__ __forceinline__ void for_each_chunk(int count, const Body& body) {
#pragma unroll 2
  for (int at = 0; at < count; at += 32 * kOfLane) body(at + kOfLane * int(threadIdx.x % 32));
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}
__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

// The row of this warp, of all heads' rows.
struct RowOfWarp {
  int row, query, head, batch;
  __device__ __forceinline__ explicit RowOfWarp(const SoftmaxParams& p)
      : row(int(blockIdx.x * kRowsOfCta + threadIdx.x / 32)), query(row % p.sq), head(row / p.sq % p.hq),
        batch(row / p.sq / p.hq) {}
};
