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

// The max, the min or the bits of all lanes of a converged warp.
template <class T, class Both>
__device__ __forceinline__ T combine_lanes(T x, const Both& both) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x = both(x, __shfl_xor_sync(0xffffffff, x, other));
  return x;
}
#if __CUDA_ARCH__ >= 800
template <class T>
__device__ __forceinline__ T max_of_warp(T x) { return __reduce_max_sync(0xffffffff, x); }
__device__ __forceinline__ int min_of_warp(int x) { return __reduce_min_sync(0xffffffff, x); }
__device__ __forceinline__ u32 bits_of_warp(u32 x) { return __reduce_or_sync(0xffffffff, x); }
#else
template <class T>
__device__ __forceinline__ T max_of_warp(T x) {
  return combine_lanes(x, [](T a, T b) { return max(a, b); });
}
__device__ __forceinline__ int min_of_warp(int x) {
  return combine_lanes(x, [](int a, int b) { return min(a, b); });
}
__device__ __forceinline__ u32 bits_of_warp(u32 x) {
  return combine_lanes(x, [](u32 a, u32 b) { return a | b; });
}
#endif

// `threads`: the number of threads that arrive or wait.
__device__ __forceinline__ void named_barrier_arrive(u32 name, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(u32 name, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
