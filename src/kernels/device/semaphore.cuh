// Turns: CTAs change the same global memory in an order, each after the one that passes the turn on to it.
#pragma once
#include "host_device/host_device.h"

// Whose turn it is. What was done before that was stored is there.
__device__ __forceinline__ int load_turn(const int* at) {
  int turn;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(turn) : "l"(at) : "memory");
  return turn;
}
__device__ __forceinline__ void pass_turn(int* at, int to) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(to) : "memory");
}

// Orders what this thread has heard of global memory before what TMA does to it later.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
