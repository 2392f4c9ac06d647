// The kernel of the warp path: its warps find their work tiles, set up Q and the ring of K and V, and compute.
// compute() is in the file that includes this one, decode_warp.cu or decode_codes.cu.
#pragma once
#include "decode/append.cuh"
#include "decode/codes/queries.cuh"
#include "decode/loads/heads_ring.cuh"
#include "decode/loads/query.cuh"
#include "decode/loads/warp_ring.cuh"

static_assert(!kWarpgroupPath);

// Q of the work tiles that have keys, one after another. All threads copy it through registers to shared memory. They
// load it a work tile ahead (kAhead), unless there are no registers for that: where rows are read by elements, and with
// wide heads together with codes, small pages or windows of transformed scores.
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
    for (int i = 0; kAhead && i < kThreadChunks; ++i)
      if (at(i) < kQueryRows * kQueryChunks) *reinterpret_cast<uint4*>(raw + query_place(at(i))) = chunks_[i];
    sync_compute_warps();
    if constexpr (kCodesK) {
      prepare_queries(p, tile, [&](int head) { return BlockRows<kOfK>::begin(p, tile, head) / 2; });
      sync_compute_warps();
    }
  }
  // Loads Q of the next work tile, which its begin_work_tile stores.
  __device__ __forceinline__ void prefetch(const DecodeParams& p, const WorkTile& next) {
    if (kAhead) fetch(p, next);
  }

 private:
  enum : int {
    kThreadChunks = (kQueryRows * kQueryChunks + kComputeThreads - 1) / kComputeThreads,
    kAhead = kQWhole && kHeads == 1 && !(kHeadDim > 128 && (kCodesK || kCodesV)) &&
             !(kHeadDim > 240 && ((kPage > 0 && kBlockKeys == 16) || (kScoreMode && kHasLeft))),
  };

  static __device__ __forceinline__ int at(int i) { return threadIdx.x + i * kComputeThreads; }

  __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& tile) {
#pragma unroll
    for (int i = 0; i < kThreadChunks; ++i)
      if (at(i) < kQueryRows * kQueryChunks) chunks_[i] = query_chunk(p, tile, at(i)).load();
  }

  uint4 chunks_[kThreadChunks];
};

template <bool together>
struct RingOf {
  using Type = WarpRing;
};
template <>
struct RingOf<true> {
  using Type = HeadsRing;
};
using TileRing = RingOf<(kHeads > 1)>::Type;

// Where Q of a warp lies.
__device__ __forceinline__ u32 query_of_warp(int warp_in_group) {
  return shared_base() + kLayout.q + warp_in_group * kRowsOfWarp * kPanelRowBytes;
}

// Computes the work tiles of the CTA, which has at least one.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, Queries& queries,
                                        TileRing& ring);

// Loads and computes, from the first work tile of the CTA on. `full`: the barriers of boxes, of all warp groups.
template <class Ring>
__device__ __forceinline__ void attend(const DecodeParams& p, WorkTiles& work_tiles, u32 full) {
  const int warp = uniform(threadIdx.x / 32);
  const u32 smem = shared_base();
  if constexpr (Ring::kIsOfCta) {
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
    const LaneLoader load(p, tiles, warp % kWarpsPerGroup);
    Queries queries(p, work_tiles.tile);
    Ring ring(load, smem + (kWarpGroups > 1 ? warp_group * kLayout.group_bytes : 0), full + 8 * kKStages * warp_group);
    compute(p, work_tiles, queries, ring);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 full = shared_base() + kLayout.tile_full;
  if constexpr (kBoxKeys > 0) {
    if (threadIdx.x == 0) {
      if constexpr (kHeads > 1) HeadsRing::init(shared_base());
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
