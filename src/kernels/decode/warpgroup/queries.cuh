// Q as the warps that compute see it.
#pragma once
#include "decode/loads/warpgroup_loads.cuh"

// Q of the work tiles that have keys, one after another. Warps that load bring it, except the first one.
class Queries {
 public:
  __device__ __forceinline__ Queries(const DecodeParams& p, const WorkTile& first, bool more)
      : buffer_(shared_base(), 0), is_there_(more && first.has_keys()) {
    if (is_there_) copy_query<kComputeThreads>(p, first, threadIdx.x);
    async_copy_commit();
    // The warps that load wait for this, as Q would arrive late after requests of K and V.
    named_barrier_arrive(kFirstQuery, kCtaThreads);
    async_copy_wait<0>();
    sync_compute_warps();
  }
  __device__ __forceinline__ void begin_work_tile(const DecodeParams&, const WorkTile&) {
    if (!is_there_) {
      buffer_.wait_full();
      buffer_.advance();
    }
    is_there_ = false;
    fence_async_proxy();
  }
  // Releases Q, which the warp group does not read again.
  __device__ __forceinline__ void release() const { mbarrier_arrive_if(buffer_.empty(), threadIdx.x % 32 == 0); }

 private:
  QueryBuffer buffer_;
  bool is_there_;
};
