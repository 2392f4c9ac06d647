// Operations of a warp or a warpgroup as a whole: registers, elected lanes, uniform values, named barriers.
#pragma once
#include "host_device/host_device.h"

template <int registers>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void registers_drop() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Non-zero in exactly one lane of a converged warp.
__device__ __forceinline__ u32 elect_one() {
  u32 elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(elected));
  return elected;
}

// Read again in each call (volatile), so that no register is kept for it.
__device__ __forceinline__ u32 lane_of_warp() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Keeps the compiler from moving uses of registers above the preceding wait.
template <int count>
__device__ __forceinline__ void register_fence(float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int count>
__device__ __forceinline__ void register_fence(u32 (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// A value that is the same in the whole warp: the compiler then keeps it, and what depends on it, in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// `threads`: the number of threads that arrive or wait.
__device__ __forceinline__ void named_barrier_arrive(u32 name, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(u32 name, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
