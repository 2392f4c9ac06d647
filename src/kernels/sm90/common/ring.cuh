// Rings of buffers in shared memory by which the producer warp passes tiles to the consumer warpgroups. Each buffer has
// two barriers, which signal that it is full and that it is empty.
#pragma once
#include "kernel_config.h"
#include "sm90/ptx/descriptor.cuh"
#include "sm90/ptx/mbarrier.cuh"
#include "sm90/ptx/tma.cuh"

// The position of the producer, or of a consumer, in a ring of `kStages` buffers of `kBytes`. The other parameters are
// offsets in shared memory.
template <u32 kBuffers, u32 kBytes, u32 kFull, u32 kEmpty, u32 kStages>
struct Buffers {
  u32 smem;
  Ring ring;
  __device__ __forceinline__ Buffers(u32 smem, u32 first_parity) : smem(smem), ring(first_parity) {}
  __device__ __forceinline__ u32 address() const { return smem + kBuffers + ring.stage() * kBytes; }
  __device__ __forceinline__ u32 full() const { return smem + kFull + 8 * ring.stage(); }
  __device__ __forceinline__ u32 empty() const { return smem + kEmpty + 8 * ring.stage(); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), ring.parity()); }
  __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), ring.parity()); }
  __device__ __forceinline__ void advance() { ring.advance(kStages); }
  // Releases a buffer that only products have read, which are complete.
  __device__ __forceinline__ void release(u32 leader) {
    mbarrier_arrive_if(empty(), leader);
    advance();
  }
  // Releases a buffer from which the warp has loaded: waits for the loads, as the next bytes could overwrite what they
  // read.
  __device__ __forceinline__ void release_loaded(u32 leader) {
    fence_async_proxy();
    __syncwarp();
    release(leader);
  }
  // A buffer is full when the producer has arrived `arrivals` times, and all expected bytes are there.
  static __device__ __forceinline__ void init(u32 smem, u32 arrivals, u32 reading_warps) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem + kFull + 8 * i, arrivals);
      mbarrier_init(smem + kEmpty + 8 * i, reading_warps);  // the first lane of each arrives
    }
  }
};
