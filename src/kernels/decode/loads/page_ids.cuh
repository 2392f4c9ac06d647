// The ids of pages, which a warp of the warpgroup path loads far before the keys that need them.
#pragma once
#include "decode/work_tile.cuh"

// The page ids of a work tile, which a warp loads far ahead: a load is served after all earlier requests of TMA, which
// takes 10 000 cycles and more. Each lane holds one of 32 successive ids, and one of the 32 after these.
class PageIds {
 public:
  // Goes to a tile of keys whose first page is number `page` of the sequence: the first tile of a work tile, where it
  // `begins`, else one whose first page is less than 32 pages after that of the tile before.
  __device__ __forceinline__ void go(const DecodeParams& p, const WorkTile& tile, int page, bool begins) {
    if (begins) {
      first_ = page / 32 * 32;
      here_ = load(p, tile, first_);
    } else {
      if (page < first_ + 32) return;
      first_ += 32;
      here_ = next_;
    }
    next_ = load(p, tile, first_ + 32);
  }
  // The id of a page of this tile, of which `last` is the last one: -1 after those of the sequence. It may be another
  // page in each lane. There are less than 32 in a tile.
  __device__ __forceinline__ int id(int page, int last) const {
    const int here = __shfl_sync(0xffffffff, here_, page % 32);
    if (last < first_ + 32) return here;  // without waiting for the next ids
    const int next = __shfl_sync(0xffffffff, next_, page % 32);
    return page < first_ + 32 ? here : next;
  }

 private:
  static __device__ __forceinline__ int load(const DecodeParams& p, const WorkTile& tile, int first) {
    const int page = first + int(threadIdx.x % 32), keys = tile.sequence.n.k_start + tile.sequence.n.sk;
    return page * kPage < keys ? page_id(p, page_ids(p, tile), page) : -1;
  }

  int first_, here_, next_;
};
