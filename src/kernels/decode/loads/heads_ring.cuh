// The ring of K and V of a CTA that reads several heads together (kHeads). A warp of its own fills it by TMA: a box of
// K, and one of V, has the rows of all heads.
#pragma once
#include "decode/codes/code_loader.cuh"

// The ring as warps that compute see it. Each tile is for the warps of one warp group.
class HeadsRing {
 public:
  enum : int {
    kIsOfCta = 1,
    // Warps that load give registers to those that compute. setmaxnreg counts them by eight.
    kLoadRegisters = kCtaWarps > 16 ? 32 : 56,
    kRegisters = 512 / max_of(kCtaWarps / 4, 1) / 8 * 8,
    kComputeRegisters = (kCtaWarps * kRegisters - 4 * kLoadRegisters) / kComputeWarps / 8 * 8,
  };

  __device__ __forceinline__ explicit HeadsRing(u32 buffers) : buffers_(buffers) {}

  template <class Sync>
  __device__ __forceinline__ u32 keys(Sync) {
    mbarrier_wait(buffers_ + kLayout.k_full + 8 * stage_, parity_);
    return buffers_ + kLayout.k + stage_ * kLayout.k_bytes + RowsOfHeads<kOfK>::place();
  }
  // Releases K. All loads of this warp from it have completed, as an arrival may overtake loads in flight.
  __device__ __forceinline__ void release_keys() const { release(kLayout.k_empty); }
  __device__ __forceinline__ void wait_values() const {
    mbarrier_wait(buffers_ + kLayout.v_full + 8 * stage_, parity_);
  }
  __device__ __forceinline__ u32 values() const {
    return buffers_ + kLayout.v + stage_ * kLayout.v_bytes + RowsOfHeads<kOfV>::place();
  }
  __device__ __forceinline__ u32 scales() const { return buffers_ + kLayout.scales + stage_ * kLayout.scale_bytes; }
  // Whether a warp group computes this tile. A stage always belongs to the same warp group: a warp that does not wait
  // each time the stage is filled could not know from the parity of the barrier how often it was.
  __device__ __forceinline__ bool is_of(int warp_group) const { return stage_ % kWarpGroups == warp_group; }
  __device__ __forceinline__ void advance() {
    release(kLayout.v_empty);
    skip();
  }
  __device__ __forceinline__ void skip() {
    if (++stage_ == kKStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  static_assert(kHeads == 1 || kKStages % kWarpGroups == 0);

  static __device__ __forceinline__ void init(u32 buffers) {
#pragma unroll 1
    for (int i = 0; i < kKStages; ++i) {
      mbarrier_init(buffers + kLayout.k_full + 8 * i, 1 + (scale_pitch(kOfK) > 0 ? 32 : 0));
      mbarrier_init(buffers + kLayout.v_full + 8 * i, 1 + (scale_pitch(kOfV) > 0 ? 32 : 0));
      mbarrier_init(buffers + kLayout.k_empty + 8 * i, kWarpsPerGroup);
      mbarrier_init(buffers + kLayout.v_empty + 8 * i, kWarpsPerGroup);
    }
  }
  // Fills the ring, by a warp that does nothing else.
  static __device__ __forceinline__ void fill(const DecodeParams& p, const WorkTiles& work_tiles, u32 buffers) {
    CodeLoader load(p, TileWalk(p, work_tiles, true, 0), 0);
    int stage = 0;
    u32 parity = 1;
#pragma unroll 1
    for (; load.more(); load.next()) {
      const u32 scales = buffers + kLayout.scales + stage * kLayout.scale_bytes;
      mbarrier_wait(buffers + kLayout.k_empty + 8 * stage, parity);
      load.copy_heads<kOfK>(p.k_map, buffers + kLayout.k + stage * kLayout.k_bytes, scales,
                            buffers + kLayout.k_full + 8 * stage);
      mbarrier_wait(buffers + kLayout.v_empty + 8 * stage, parity);
      load.copy_heads<kOfV>(p.v_map, buffers + kLayout.v + stage * kLayout.v_bytes, scales,
                            buffers + kLayout.v_full + 8 * stage);
      if (++stage == kKStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

 private:
  __device__ __forceinline__ void release(u32 empty) const {
    fence_async_proxy();
    __syncwarp();
    mbarrier_arrive_if(buffers_ + empty + 8 * stage_, threadIdx.x % 32 == 0);
  }

  u32 buffers_;
  int stage_ = 0;
  u32 parity_ = 0;
};
