// The ring of K and V of a warp group of the warp path. The warps that compute fill it for themselves, by cp.async or
// TMA, kAhead tiles before they compute one.
#pragma once
#include "decode/loads/lane_loader.cuh"

class WarpRing {
 public:
  enum : int { kIsOfCta = 0 };  // each warp group has its own

  // `full`: the barriers of its stages, where boxes fill it.
  __device__ __forceinline__ WarpRing(const LaneLoader& load, u32 buffers, u32 full)
      : load_(load), buffers_(buffers), full_(full) {
    // Where a CTA has one work tile, a loop that is not unrolled waits for fewer instructions.
#pragma unroll Schedule::kOneTile ? 1 : kAhead
    for (int tile = 0; tile < kAhead; ++tile) start();
  }

  // Waits for the next tile and starts the loads of another one into the stage that is free then. Returns K. `sync` is
  // a barrier of the warp group.
  template <class Sync>
  __device__ __forceinline__ u32 keys(Sync sync) {
    if constexpr (kBoxKeys == 0 || kScalesByLanes) async_copy_wait<kAhead - 1>();
    if constexpr (kBoxKeys > 0) mbarrier_wait(full_ + 8 * stage_, parity_);
    if constexpr (kHalfScales) load_.take_lower_halves(upper_halves_ >> kHalfBits * (kAhead - 1), scales());
    sync();
    if constexpr (kKPiece == 2 || kVPiece == 2) {
      load_.align_rows<kOfK>(buffers_ + kLayout.k + stage_ * kLayout.k_bytes);
      load_.align_rows<kOfV>(values());
      sync();
    }
    start();
    return buffers_ + kLayout.k + stage_ * kLayout.k_bytes;
  }
  // V and the scales of that tile.
  __device__ __forceinline__ u32 values() const { return buffers_ + kLayout.v + stage_ * kLayout.v_bytes; }
  __device__ __forceinline__ u32 scales() const { return buffers_ + kLayout.scales + stage_ * kLayout.scale_bytes; }
  // As in HeadsRing, where other warps fill the ring.
  __device__ __forceinline__ bool is_of(int) const { return true; }
  __device__ __forceinline__ void release_keys() const {}
  __device__ __forceinline__ void wait_values() const {}
  __device__ __forceinline__ void advance() { skip(); }
  __device__ __forceinline__ void skip() {
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  enum : int {
    kStages = kKStages,
    kAhead = kStages - 1,
    kHalfBits = LaneLoader::kHalfBits,
    kScalesByLanes = scale_words_before(kScaleTensors) > 0,
    kHalfScales = kKScaleType == kF16 || kVScaleType == kF16 || kKZeroPointType == kF16 || kVZeroPointType == kF16,
  };
  static_assert(kKStages == kVStages && (kHeads > 1 || kHalfBits * kAhead <= 32));

  // Starts the loads of the next tile, if there is one. They are one group of cp.async, which may be empty.
  __device__ __forceinline__ void start() {
    upper_halves_ <<= kHalfBits;
    if (load_.more()) {
      if constexpr (kScalesByLanes > 0)
        upper_halves_ |= load_.copy_scales(buffers_ + kLayout.scales + free_ * kLayout.scale_bytes);
      const u32 k = buffers_ + kLayout.k + free_ * kLayout.k_bytes;
      const u32 v = buffers_ + kLayout.v + free_ * kLayout.v_bytes;
      if constexpr (kBoxKeys > 0) {
        load_.copy_boxes(k, v, full_ + 8 * free_);
      } else if (load_.whole()) {
        load_.copy_keys<true>(k);
        load_.copy_values<true>(v);
      } else {
        load_.copy_keys<false>(k);
        load_.copy_values<false>(v);
      }
      load_.next();
    }
    if constexpr (kBoxKeys == 0 || kScalesByLanes) async_copy_commit();
    if (++free_ == kStages) free_ = 0;
  }

  LaneLoader load_;
  u32 buffers_;
  int stage_ = 0, free_ = 0;
  u32 full_, parity_ = 0;  // the barriers of boxes, and the phase that the next wait is for
  u32 upper_halves_ = 0;   // what copy_scales returned for the tiles in flight, the last one in the lowest bits
};
