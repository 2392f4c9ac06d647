// What a warp or a warpgroup does as one: its registers, one lane for all, one value for all, named barriers.
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

// Read anew each time: no register is kept for it where loads are rare and registers few.
__device__ __forceinline__ u32 lane_of_warp() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Ties registers to this point of the program, so that no use moves above the wait before it.
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

// One value for the whole warp; tells the compiler so, and what is computed from it lives in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

// `threads`: of those that arrive and those that wait together.
__device__ __forceinline__ void named_barrier_arrive(u32 name, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(u32 name, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
