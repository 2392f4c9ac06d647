// Semaphores in global memory, by which CTAs order their accesses to other global memory.
#pragma once
#include "host_device/host_device.h"

// Loads a semaphore. Data that another CTA wrote before it stored this value is visible afterwards.
__device__ __forceinline__ int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// load_acquire() for polls of which it is not certain that they will ever read another value.
__device__ __forceinline__ int look_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// Loads a semaphore early, without ordering, so that the latency overlaps with other work.
__device__ __forceinline__ int load_early(const int* at) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// Stores a semaphore after all earlier writes of this thread.
__device__ __forceinline__ void store_release(int* at, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Orders acquired global data before later TMA operations of this thread on it.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
