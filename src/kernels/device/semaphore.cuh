// Semaphores in global memory, by which CTAs order their accesses to other global memory.
#pragma once
#include "host_device/host_device.h"

// The value of a semaphore. What another CTA wrote before it stored this value is visible after the load.
__device__ __forceinline__ int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// load_acquire() where another value than the one before is not certain to come.
__device__ __forceinline__ int look_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// The same before it is known to be the one that is waited for: the load is on its way while other work goes on.
__device__ __forceinline__ int load_early(const int* at) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// Stores the value of a semaphore after everything that this thread has written.
__device__ __forceinline__ void store_release(int* at, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Orders what this thread has acquired of global memory before its later TMA operations on it.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
