// The tiles of keys of a warp group, over all work tiles of its CTA, in the order in which warps load them.
#pragma once
#include "decode/schedule/schedule.cuh"

class TileWalk {
 public:
  // `work_tiles` is at the first one, if there are `more`.
  __device__ __forceinline__ TileWalk(const DecodeParams& p, const WorkTiles& work_tiles, bool more, int warp_group)
      : p_(p), work_tiles_(work_tiles), more_(more), warp_group_(warp_group) {
    tile_ = work_tile().begin + warp_group_;
    if (!more_) return;
    requests_.begin_tile(p_, work_tiles_.schedule, tiles_left());
    find_tile();
  }

  __device__ __forceinline__ bool more() const { return more_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ const WorkTile& work_tile() const { return work_tiles_.tile; }
  __device__ __forceinline__ int warp_group() const { return warp_group_; }
  __device__ __forceinline__ bool begins_work_tile() const { return tile_ == work_tile().begin + warp_group_; }
  __device__ __forceinline__ bool in_first_work_tile() const { return first_; }
  __device__ __forceinline__ void next() {
    tile_ += kStep;
    requests_.after_load(p_, work_tiles_.schedule, tiles_left());
    find_tile();
  }
  __device__ __forceinline__ void next_work_tile() {
    tile_ = work_tile().end;
    find_tile();
  }

 private:
  enum : int { kStep = kHeads > 1 ? 1 : int(kWarpGroups) };  // tiles; with kHeads one warp loads those of all

  // Goes to the next work tile that has a tile for this warp group, where this one has no more.
  __device__ __forceinline__ void find_tile() {
    while (tile_ >= work_tile().end) {
      more_ = work_tiles_.next(p_, kLoadsAhead);
      if (!more_) return;
      first_ = false;
      tile_ = work_tile().begin + warp_group_;
      requests_.begin_tile(p_, work_tiles_.schedule, tiles_left());
    }
  }

  __device__ __forceinline__ int tiles_left() const {
    return (work_tile().end - tile_ + kStep - 1) / kStep;
  }

  const DecodeParams& p_;
  WorkTiles work_tiles_;
  bool more_;
  bool first_ = true;
  int warp_group_, tile_;
  Schedule::Requests requests_;
};
