// How Q, K and V pass from the producer warp to the consumer warpgroups: rings of buffers in shared memory, each buffer
// with a barrier that says it is full and one that says it is empty.
#pragma once
#include "attention/fragment.cuh"
#include "sm90/common/ring.cuh"
#include "sm90/forward/layout.cuh"

using QBuffers = Buffers<kLayout.q, kLayout.q_bytes, kLayout.q_full, kLayout.q_empty, kQStages>;
using KBuffers = Buffers<kLayout.k, kLayout.k_bytes, kLayout.k_full, kLayout.k_empty, kKStages>;
using VBuffers = Buffers<kLayout.v, kLayout.v_bytes, kLayout.v_full, kLayout.v_empty, kVStages>;

// Where the View of a strip lies.
__device__ __forceinline__ u32 view_address(u32 smem, u32 stage, u32 strip) {
  return smem + kLayout.view + sizeof(View) * (stage * kConsumers + strip);
}

// Where the HeadOfCodes of a q tile lies.
__device__ __forceinline__ u32 head_address(u32 smem, u32 stage) {
  return smem + kLayout.head + sizeof(HeadOfCodes) * stage;
}

// A consumer's side of the rings of K and V. With kPairs K of a key tile and V of the tile to its right have one pair
// of barriers: the consumer waits for both where it waits for K, and releases both where it releases V.
struct KvBuffers {
  u32 smem;
  u32 leader;  // this thread arrives for its warp
  KBuffers k;
  VBuffers v;
  NextTile next;  // the tile after that of K's buffer, once load_next_tile() has read it (maps/tile_info.cuh)

  __device__ __forceinline__ KvBuffers(u32 smem, u32 leader) : smem(smem), leader(leader), k(smem, 0), v(smem, 0) {}

  __device__ __forceinline__ u32 k_operand() const { return uniform_descriptor(k.address(), 0); }
  __device__ __forceinline__ u32 v_operand() const {
    if constexpr (kPairs) return uniform_descriptor(smem + kLayout.v + k.ring.stage() * kLayout.v_bytes, kPanelBytes);
    else return uniform_descriptor(v.address(), kPanelBytes);
  }
  // The bias of this warpgroup's strip, or the words of its mask: they come with K.
  __device__ __forceinline__ u32 bias_tile() const {
    return k.address() + kLayout.bias + consumer() * kLayout.strip_bias_bytes;
  }

  __device__ __forceinline__ void wait_k() const { k.wait_full(); }
  __device__ __forceinline__ void wait_v() const {
    if constexpr (!kPairs) v.wait_full();
  }
  // V of the leftmost tile: no K comes with it.
  __device__ __forceinline__ void wait_last_v() const {
    if constexpr (kPairs) k.wait_full();
    else v.wait_full();
  }

  __device__ __forceinline__ void release_k() { k.release(leader); }
  // Where the warp has loaded a bias, or words of a mask, from the buffer. With kBiasInP the scores have taken what it
  // loaded, so that no load is under way and none needs a fence.
  __device__ __forceinline__ void release_loaded_k() {
    if constexpr (kBiasInP) {
      __syncwarp();
      k.release(leader);
    } else {
      k.release_loaded(leader);
    }
  }
  __device__ __forceinline__ void release_v() {
    if constexpr (kPairs) k.release(leader);
    else v.release(leader);
  }
  // Releases key tiles of which this warpgroup's strip sees nothing.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      k.wait_full();
      k.release(leader);
      if constexpr (!kPairs) {
        v.wait_full();
        v.release(leader);
      }
    }
  }
  // Releases such tiles on the right of the walk. With kPairs n key tiles are n + 1 pairs, and a strip that sees no
  // tile releases one more.
  __device__ __forceinline__ void skip_front(const KeyWalk& walk) {
    skip(walk.skip_front);
    if constexpr (kPairs) skip(!walk.more() && walk.skip_front + walk.skip_back > 0);
  }
};
