// The key blocks of the portable backward kernels, and the steps of each.
#pragma once
#include "attention/mask.cuh"
#include "attention/seen_tiles.cuh"
#include "backward/layout.cuh"

// The key blocks of a head may be in descending order.
enum : int { kMayDescend = kRoles == 2 && kOrderedDq && kHasRight && !kMapsTiles };

// Whether the key blocks of a head are in descending order.
__device__ __forceinline__ bool blocks_descend(const BackwardParams& p) {
  return kMayDescend && p.key_blocks.order == kDescending;
}

// A key block with its sequence and kv head and, with kSplits, the split of its q heads.
struct Keys {
  int block, head, batch;
  Lengths n;
  int split;
  __device__ __forceinline__ int first() const { return block * kBlockKeys; }
};

// The steps of a key block: all q heads of the split for each row tile that sees some of its keys. With a right bound
// row tiles are in descending order, because all key blocks of a head see the last one: CTAs that run at the same time
// read the same rows and, with kOrderedDq, each adds right after the previous one. If key blocks are in descending
// order, each begins at its diagonal: when it reaches the next row tile, the previous block, which began there, has
// added to it.
class AllSteps {
 public:
  __device__ __forceinline__ AllSteps(const BackwardParams& p, const Keys& keys)
      : tiles_(row_tiles(band_of(p), keys.n, kBlockRows, keys.first(), kBlockKeys)), head_(keys.head * p.group),
        group_(kSplits ? p.split_heads : p.group), left_((tiles_.end - tiles_.begin) * group_), g_(0),
        down_(kHasRight && !blocks_descend(p)) {
    if (kSplits) head_ += keys.split * group_;
    tile_ = down_ ? tiles_.end - 1 : tiles_.begin;
  }
  __device__ __forceinline__ bool more() const { return left_ > 0; }
  __device__ __forceinline__ void advance() {
    --left_;
    if (++g_ < group_) return;
    g_ = 0;
    tile_ += down_ ? -1 : 1;
  }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ int head() const { return head_ + g_; }  // the q head
  __device__ __forceinline__ bool mask_hides() const { return false; }

 private:
  RowTiles tiles_;
  int head_, group_, left_, g_, tile_;
  bool down_;
};

// The steps of a key block that the map of tiles shows.
template <class Params>
class StepsOfMap : public SeenSteps<Params> {
  using Seen = SeenSteps<Params>;
  // With kOrderedDq key blocks add to dQ in ascending order: if a row tile belongs to two documents, blocks of the
  // earlier one begin with it, and those of the later one end with it. Without dQ the order is the same, so that sums
  // of dK and dV are equal.
  static constexpr bool kDown = kHasRight || kOrderedDq || !kComputesDq;

 public:
  __device__ __forceinline__ StepsOfMap(const Params& p, const Keys& keys)
      : StepsOfMap(p, keys, row_tiles(band_of(p), keys.n, kBlockRows, keys.first(), kBlockKeys)) {}
  __device__ __forceinline__ void advance() { Seen::next(); }
  __device__ __forceinline__ int head() const { return first_ + Seen::g; }
  __device__ __forceinline__ bool mask_hides() const { return Seen::is_partial(); }

 private:
  // The number of q heads of the split.
  static __device__ __forceinline__ int heads(const Params& p) { return kSplits ? p.split_heads : p.group; }
  static __device__ __forceinline__ int first_head(const Params& p, const Keys& keys) {
    return keys.head * p.group + (kSplits ? keys.split * heads(p) : 0);
  }
  __device__ __forceinline__ StepsOfMap(const Params& p, const Keys& keys, const RowTiles& tiles)
      : Seen(p, keys.batch, first_head(p, keys), heads(p), keys.block, tiles.begin, tiles.end, kDown),
        first_(first_head(p, keys)) {}
  int first_;
};

template <bool maps, class Params>
struct StepsIf {
  using Type = AllSteps;
};
template <class Params>
struct StepsIf<true, Params> {
  using Type = StepsOfMap<Params>;
};

class Steps : public StepsIf<kMapsTiles != 0, BackwardParams>::Type {
 public:
  using Base = StepsIf<kMapsTiles != 0, BackwardParams>::Type;
  using Base::Base;
  __device__ __forceinline__ int row() const { return Base::tile() * kBlockRows; }
  // Whether some row of the step does not see some key of the block.
  __device__ __forceinline__ bool is_masked(const BackwardParams& p, const Keys& keys) const {
    const KeyRange seen = keys_seen_by_all(band_of(p), keys.n, row(), min(row() + kBlockRows, keys.n.sq) - 1);
    return Base::mask_hides() || fulgur::kernels::is_partial(seen, keys.first(), keys.first() + kBlockKeys);
  }
  // The index of the first row in the statistics.
  __device__ __forceinline__ long long statistics(const BackwardParams& p, const Keys& keys) const {
    return Base::head() * (long long)(p.statistics_rows) + statistics_row(keys.n, kPacked, keys.batch, p.sq) + row();
  }
};
