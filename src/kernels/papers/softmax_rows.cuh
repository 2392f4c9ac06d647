// What the kernels of S, P and dP have in common: a warp reads and writes a row in memory, each lane 8 elements at a
// time.
#pragma once
#include "device/math.cuh"
#include "device/operands.cuh"
#include "device/warp.cuh"
#include "papers/standard_params.h"

enum : int { kCtaRows = 8, kLaneElements = 8 };
using Memory = ElementQ::Memory;
using Chunk = Pack<Memory, kLaneElements>;   // of P and dP
using Scores = Pack<float, kLaneElements>;  // of S

// Calls body(first) with the first element of each chunk of kLaneElements that this lane has of a row of `count`
// elements. All lanes call it equally often, so the last chunk may lie after the end of the row.
template <class Body>
__device__ __forceinline__ void for_each_chunk(int count, const Body& body) {
#pragma unroll 2
  for (int at = 0; at < count; at += 32 * kLaneElements) body(at + kLaneElements * int(threadIdx.x % 32));
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

// The row of this warp: its number among the rows of all heads, and where it is.
struct RowOfWarp {
  int row, query, head, batch;
  __device__ __forceinline__ explicit RowOfWarp(const SoftmaxParams& p)
      : row(int(blockIdx.x * kCtaRows + threadIdx.x / 32)), query(row % p.sq), head(row / p.sq % p.hq),
        batch(row / p.sq / p.hq) {}
};
