// The schedule of a plan: which work tiles a CTA computes, and how their partial results are combined. A schedule is a
// type, which kernel_config.h names. Each warp has an object of it, the state of its current work tile. Its members:
//   first(p, tile)              finds the first work tile of the CTA; false: it has none. All threads of the CTA call
//                               it, and on the warpgroup path meet at a barrier in it
//   next(p, tile, ahead)        goes on to the next work tile; false: there is none. Every warp calls it for itself.
//                               `ahead`: the warp loads ahead, and comes to the work tile again for its products
//   partial_of(p, tile, split)  where a split of the work tile's q block stores its partial result
//   slot_of(p, tile, split)     the number of that place, and of the ticket of a group of splits that begins there;
//                               not with kCombineKernel
//   find_splits(p, tile)        finds the q block of a CTA of decode/combine.cu, and its number of splits; only with
//                               kCombineKernel
//   kCombineKernel              decode/combine.cu combines the splits; else the last CTA at each q block does
//   kFragments                  partial results are stored as the threads of a warpgroup hold them; else by rows
//   kOneTile                    a CTA has at most one work tile
//   kCombinesAtEnd              CTAs combine q blocks of many splits together, after their last work tile
//   Requests                    what the first warp that loads does for the schedule
#pragma once
#include "decode/schedule/dynamic.cuh"
#include "decode/schedule/split_to_fill.cuh"
#include "decode/schedule/stream_k.cuh"

using Schedule = FULGUR_SCHEDULE;

// InvariantSplits of packed keys: kPackedSplitKeys counts with chunks of kChunkKeys.
static_assert(!kPackedK || !Schedule::kCombineKernel || Schedule::kOneTile || int(kKeysPerChunk) == int(kChunkKeys));

// The work tiles of a CTA, one after another: 16 ints, which a warp may leave in shared memory.
struct alignas(16) WorkTiles {
  WorkTile tile;
  Schedule schedule;

  __device__ __forceinline__ bool first(const DecodeParams& p) { return schedule.first(p, tile); }
  // The same, if there are `more`. Returns whether the CTA has something to do, be it without a work tile.
  __device__ __forceinline__ bool first(const DecodeParams& p, bool& more) {
    more = first(p);
    return more || Schedule::kCombinesAtEnd || kUnreadRows;
  }
  __device__ __forceinline__ bool next(const DecodeParams& p, bool ahead = false) {
    return schedule.next(p, tile, ahead);
  }
};
static_assert(sizeof(WorkTiles) == 64);  // decode_layout

// The place in shared memory where a warp keeps its work tiles during the loop over keys, which needs their registers.
class SavedWorkTiles {
 public:
  __device__ __forceinline__ explicit SavedWorkTiles(int warp)
      : warp_(warp),
        at_(shared_base() + kLayout.work_tiles + warp * int(sizeof(WorkTiles))) {}

  __device__ __forceinline__ void save(const WorkTiles& work_tiles) const {
    if (lane_of_warp() == 0) store_shared_struct(at_, work_tiles);
  }
  __device__ __forceinline__ WorkTiles load() const { return load_shared_struct_uniform<WorkTiles>(at_); }

  // The keys of the sequence of the work tile.
  __device__ __forceinline__ int keys() const {
    __syncwarp();
    return reinterpret_cast<const WorkTiles*>(raw + kLayout.work_tiles)[warp_].tile.sequence.n.sk;
  }

 private:
  int warp_;
  u32 at_;
};
