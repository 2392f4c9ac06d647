// Barriers in shared memory (mbarrier) and rings of buffers. Addresses are 32-bit shared addresses.
#pragma once
#include "host_device/host_device.h"

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives where `on` is set, without a branch: a divergent branch with wgmmas in flight would serialize them.
__device__ __forceinline__ void mbarrier_arrive_if(u32 barrier, u32 on) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
      "r"(on)
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A ring of `stages` buffers seen from one side: which buffer is next, and the parity to wait for; one register.
struct Ring {
  u32 state;  // 2 * stage + parity
  __device__ __forceinline__ explicit Ring(u32 first_parity) : state(first_parity) {}
  __device__ __forceinline__ u32 stage() const { return state >> 1; }
  __device__ __forceinline__ u32 parity() const { return state & 1; }
  __device__ __forceinline__ void advance(u32 stages) {
    state += 2;
    if (state >= 2 * stages) state = ~state & 1;
  }
};
