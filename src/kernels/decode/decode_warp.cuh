// The kernel of the warp path, and what its warps have on the way: Q of their work tiles, and a ring of K and V. The
// file that includes this has compute().
#pragma once
#include "decode/append.cuh"
#include "decode/loads.cuh"

static_assert(!kWarpgroupPath);

// Q of the work tiles that have keys, one after another. All threads copy it through registers: ahead of its place in
// shared memory, or when that is free where registers are full, as elements need them, and all that scores may need
// with the widest heads.
class Queries {
 public:
  __device__ __forceinline__ Queries(const DecodeParams& p, const WorkTile& first) {
    if (kAhead) fetch(p, first);
  }
  __device__ __forceinline__ void begin_work_tile(const DecodeParams& p, const WorkTile& tile) {
    if (!kAhead) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kQueryRows * kQueryChunks; i += kComputeThreads)
        *reinterpret_cast<uint4*>(raw + query_place(i)) = query_chunk(p, tile, i).load();
    }
#pragma unroll
    for (int i = 0; kAhead && i < kOfThread; ++i)
      if (at(i) < kQueryRows * kQueryChunks) *reinterpret_cast<uint4*>(raw + query_place(at(i))) = chunks_[i];
    sync_compute_warps();
    if constexpr (kCodesK) {
      prepare_queries(p, tile, [&](int head) { return BlockRows<kOfK>::begin(p, tile, head) / 2; });
      sync_compute_warps();
    }
  }
  // The results of the work tile before are on their way.
  __device__ __forceinline__ void prefetch(const DecodeParams& p, const WorkTile& next) {
    if (kAhead) fetch(p, next);
  }

 private:
  enum : int {
    kOfThread = (kQueryRows * kQueryChunks + kComputeThreads - 1) / kComputeThreads,
    kAhead = kQWhole && kHeads == 1 && !(kHeadDim > 128 && (kCodesK || kCodesV)) &&
             !(kHeadDim > 240 && ((kPage > 0 && kBlockKeys == 16) || (kScoreMode && kHasLeft))),
  };

  static __device__ __forceinline__ int at(int i) { return threadIdx.x + i * kComputeThreads; }

  __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& tile) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i)
      if (at(i) < kQueryRows * kQueryChunks) chunks_[i] = query_chunk(p, tile, at(i)).load();
  }

  uint4 chunks_[kOfThread];
};

// The ring of K and V of a warp group: the loads of kAhead tiles are on their way while one is computed.
class KeyValueRing {
 public:
  using Loader = LaneLoader<kTileLoaders>;
  enum : int { kOfCta = 0 };  // a warp group has its own, which its warps fill

  // `full`: its barriers, where boxes fill it.
  __device__ __forceinline__ KeyValueRing(const Loader& load, u32 buffers, u32 full)
      : load_(load), buffers_(buffers), full_(full) {
    // Where all wait for the first tile, the second one finds its instructions in the cache.
#pragma unroll Schedule::kOneTile ? 1 : kAhead
    for (int tile = 0; tile < kAhead; ++tile) start();
  }

  // K of the next tile, once it is there, and a load in the place that is free then. `sync` is a barrier of the warp
  // group.
  template <class Sync>
  __device__ __forceinline__ u32 keys(Sync sync) {
    if constexpr (kBoxKeys == 0 || kScalesOfLanes) async_copy_wait<kAhead - 1>();
    if constexpr (kBoxKeys > 0) mbarrier_wait(full_ + 8 * stage_, parity_);
    if constexpr (kHalfScales) load_.take_lower_halves(upper_halves_ >> kHalfBits * (kAhead - 1), scales());
    sync();
    if constexpr (kKPiece == 2 || kVPiece == 2) {
      load_.template align_rows<kOfK>(buffers_ + kLayout.k + stage_ * kLayout.k_bytes);
      load_.template align_rows<kOfV>(values());
      sync();
    }
    start();
    return buffers_ + kLayout.k + stage_ * kLayout.k_bytes;
  }
  // V of that tile.
  __device__ __forceinline__ u32 values() const { return buffers_ + kLayout.v + stage_ * kLayout.v_bytes; }
  __device__ __forceinline__ bool is_of(int) const { return true; }
  __device__ __forceinline__ void release_keys() const {}
  __device__ __forceinline__ void wait_values() const {}
  // What scales that tile.
  __device__ __forceinline__ u32 scales() const { return buffers_ + kLayout.scales + stage_ * kLayout.scale_bytes; }
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
    kHalfBits = Loader::kHalfBits,
    kScalesOfLanes = scale_words_before(kScaleTensors) > 0,
    kHalfScales = kKScaleType == kF16 || kVScaleType == kF16 || kKZeroPointType == kF16 || kVZeroPointType == kF16,
  };
  static_assert(kKStages == kVStages && (kHeads > 1 || kHalfBits * kAhead <= 32));

  // The loads of the next tile, of which there may be none, are one group.
  __device__ __forceinline__ void start() {
    upper_halves_ <<= kHalfBits;
    if (load_.more()) {
      if constexpr (kScalesOfLanes > 0)
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
    if constexpr (kBoxKeys == 0 || kScalesOfLanes) async_copy_commit();
    if (++free_ == kStages) free_ = 0;
  }

  Loader load_;
  u32 buffers_;
  int stage_ = 0, free_ = 0;
  u32 full_, parity_ = 0;  // barriers of boxes, and for which to wait
  u32 upper_halves_ = 0;  // LaneLoader::copy_scales of the tiles on their way, the last one lowest
};

// The ring of K and V of all warps of a CTA that reads several heads together (kHeads), as warps that compute see it.
// Each tile is there for the warps of one warp group.
class RingOfHeads {
 public:
  enum : int {
    kOfCta = 1,
    // Of those that a thread has to begin with, as many as all four warps that share them may have.
    kLoadRegisters = kCtaWarps > 16 ? 32 : 56,
    kRegisters = 512 / max_of(kCtaWarps / 4, 1) / 8 * 8,
    kComputeRegisters = (kCtaWarps * kRegisters - 4 * kLoadRegisters) / kComputeWarps / 8 * 8,
  };

  __device__ __forceinline__ explicit RingOfHeads(u32 buffers) : buffers_(buffers) {}

  template <class Sync>
  __device__ __forceinline__ u32 keys(Sync) {
    mbarrier_wait(buffers_ + kLayout.k_full + 8 * stage_, parity_);
    return buffers_ + kLayout.k + stage_ * kLayout.k_bytes + RowsOfHeads<kOfK>::place();
  }
  // Once this warp has loaded all that it needs of K: an arrival may overtake loads in flight.
  __device__ __forceinline__ void release_keys() const { release(kLayout.k_empty); }
  __device__ __forceinline__ void wait_values() const {
    mbarrier_wait(buffers_ + kLayout.v_full + 8 * stage_, parity_);
  }
  __device__ __forceinline__ u32 values() const {
    return buffers_ + kLayout.v + stage_ * kLayout.v_bytes + RowsOfHeads<kOfV>::place();
  }
  __device__ __forceinline__ u32 scales() const { return buffers_ + kLayout.scales + stage_ * kLayout.scale_bytes; }
  // Whether a warp group has this tile. Each buffer is of one of them: who waits for other buffers alone does not know
  // how often this one was filled.
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
  // Fills it, by a warp that does nothing else.
  static __device__ __forceinline__ void fill(const DecodeParams& p, const WorkTiles& work_tiles, u32 buffers) {
    LaneLoader<kTileLoaders> load(p, TileWalk(p, work_tiles, true, 0), 0);
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

template <bool together>
struct RingOf {
  using Type = KeyValueRing;
};
template <>
struct RingOf<true> {
  using Type = RingOfHeads;
};
using TileRing = RingOf<(kHeads > 1)>::Type;

// Computes the work tiles of the CTA, of which there is one.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, Queries& queries,
                                        TileRing& ring);

// What a warp does once it knows its first work tile.
template <class Ring>
__device__ __forceinline__ void attend(const DecodeParams& p, WorkTiles& work_tiles, u32 full) {
  const int warp = uniform(threadIdx.x / 32);
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if constexpr (Ring::kOfCta) {
    if (warp >= kFirstLoadWarp) {
      registers_drop<Ring::kLoadRegisters>();
      if (warp == kFirstLoadWarp) Ring::fill(p, work_tiles, smem);
      return;
    }
    registers_raise<Ring::kComputeRegisters>();
    Queries queries(p, work_tiles.tile);
    Ring ring(smem);
    compute(p, work_tiles, queries, ring);
  } else {
    const int warp_group = warp / kWarpsPerGroup;
    const TileWalk tiles(p, work_tiles, true, warp_group);
    const typename Ring::Loader load(p, tiles, warp % kWarpsPerGroup);
    Queries queries(p, work_tiles.tile);
    Ring ring(load, smem + (kWarpGroups > 1 ? warp_group * kLayout.group_bytes : 0), full + 8 * kKStages * warp_group);
    compute(p, work_tiles, queries, ring);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 full = u32(__cvta_generic_to_shared(raw)) + kLayout.tile_full;
  if constexpr (kBoxKeys > 0) {
    if (threadIdx.x == 0) {
      if constexpr (kHeads > 1) RingOfHeads::init(u32(__cvta_generic_to_shared(raw)));
#pragma unroll 1
      for (int i = 0; kHeads == 1 && i < kWarpGroups * kKStages; ++i) mbarrier_init(full + 8 * i, 1);
      fence_mbarrier_init();
    }
    __syncthreads();
  }
  WorkTiles work_tiles;
  const bool more = work_tiles.first(p);
  if (kAppends) append_rows(p, work_tiles, more);
  if (!more) return;
  attend<TileRing>(p, work_tiles, full);
}
