// The division of work in a CTA of the portable backward kernel of wide heads: its rows or keys, its steps and its
// warps.
#pragma once
#include "kernel_config.h"
#include "portable/wide_backward/layout.h"

enum : int {
  kRoles = 2,  // half of the warps multiply Q with K, the others dO with V; for dV each half of the columns of Q and K
  kOfQ = kGradient == int(WideGradient::kOfQ),
  kOfV = kGradient == int(WideGradient::kOfV),
};
#include "portable/backward/steps.cuh"

__device__ constexpr WideBackwardLayout kLayout = wide_backward_layout(
    {WideGradient(kGradient), kHeadDim, kValueDim, kBlockRows, kBlockKeys, kChunkPanels, kStages});

enum : int {
  kThreads = 32 * kWarps,
  kOwnRows = kOfQ ? kBlockRows : kBlockKeys,       // of a CTA: rows of Q and dO, or keys
  kStreamedRows = kOfQ ? kBlockKeys : kBlockRows,  // of a step: keys, or rows of Q and dO
  kOwnPanelBytes = kOwnRows * kPanelRowBytes,
  kStreamedPanelBytes = kStreamedRows * kPanelRowBytes,
  kPanelColumns = 64,
  kHeadPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns,
  kValuePanels = (kValueDim + kPanelColumns - 1) / kPanelColumns,
  // S and dP: a role has kWarps / 2 warps, each with 32 keys and kWarpRows rows.
  kKeyWarps = kBlockKeys / 32,
  kRowWarps = kWarps / 2 / kKeyWarps,
  kWarpRows = kBlockRows / kRowWarps,
  // The gradient: four warps share rows, each with 16 columns of every panel.
  kGradientDim = kOfV ? kValueDim : kHeadDim,
  kGradientPanels = kOfV ? kValuePanels : kHeadPanels,
  kOwnWarps = kWarps / 4,
  kOwnTiles = kOwnRows / 16 / kOwnWarps,  // tiles of 16 rows of a warp
};
static_assert(kWarpRows == 16 || kWarpRows == 32);
static_assert(kOwnTiles * kOwnWarps * 16 == kOwnRows);

// The part of a warp in S and dP: keys [key, key + 32) and rows [row, row + kWarpRows) of a score tile.
struct Part {
  int role, key, row;
};
__device__ __forceinline__ Part part_of_warp() {
  const int warp = uniform(threadIdx.x / 32);
  const int of_role = warp % (kWarps / 2);
  return {warp / (kWarps / 2), of_role % kKeyWarps * 32, of_role / kKeyWarps * kWarpRows};
}

// A row block of a q head, or a key block of a kv head and, with kSplits, a split of its q heads.
struct Own {
  int block, head, batch;
  Lengths n;
  int split;
  __device__ __forceinline__ int first() const { return block * kOwnRows; }
};
__device__ __forceinline__ Own own_of_cta(const BackwardParams& p) {
  const BlockOfHead at = block_of(kOfQ ? p.row_blocks : p.key_blocks, blockIdx.x);
  const int splits = kSplits && !kOfQ ? p.splits : 1;
  const int heads = kOfQ ? p.hq : p.hq / p.group;
  const int head_of_all = at.batch_head / splits;
  const int batch = head_of_all / heads;
  return {at.block, head_of_all - batch * heads, batch, lengths_of(p, batch), at.batch_head - head_of_all * splits};
}

// The score tiles of a key block.
class TilesOfKeys {
 public:
  __device__ __forceinline__ TilesOfKeys(const BackwardParams& p, const Own& own)
      : steps_(p, {own.block, own.head, own.batch, own.n, own.split}), key_(own.first()) {}
  __device__ __forceinline__ bool more() const { return steps_.more(); }
  __device__ __forceinline__ void advance() { steps_.advance(); }
  __device__ __forceinline__ int row() const { return steps_.row(); }
  __device__ __forceinline__ int key() const { return key_; }
  __device__ __forceinline__ int head() const { return steps_.head(); }
  __device__ __forceinline__ bool mask_hides() const { return steps_.mask_hides(); }

 private:
  Steps steps_;
  int key_;
};

// The score tiles of a row block: all key tiles that some of its rows see, or with a map those that it shows.
class TilesOfRows {
 public:
  __device__ __forceinline__ TilesOfRows(const BackwardParams& p, const Own& own)
      : tiles_(key_tiles(band_of(p), own.n, kBlockKeys, own.first(), min(own.first() + kBlockRows, own.n.sq) - 1)),
        row_(own.first()), head_(own.head) {}
  __device__ __forceinline__ bool more() const { return tiles_.begin < tiles_.end; }
  __device__ __forceinline__ void advance() { ++tiles_.begin; }
  __device__ __forceinline__ int row() const { return row_; }
  __device__ __forceinline__ int key() const { return tiles_.begin * kBlockKeys; }
  __device__ __forceinline__ int head() const { return head_; }
  __device__ __forceinline__ bool mask_hides() const { return false; }

 protected:
  KeyTiles tiles_;
  int row_, head_;
};

template <class Params>
class TilesOfMap : public TilesOfRows {
 public:
  __device__ __forceinline__ TilesOfMap(const Params& p, const Own& own)
      : TilesOfRows(p, own), seen_(walk_of_block(p.expression.map_of_rows, own.batch, own.head, own.block,
                                                 tiles_.begin, tiles_.end, false)) {}
  __device__ __forceinline__ bool more() const { return seen_.more(); }
  __device__ __forceinline__ void advance() { seen_.next(); }
  __device__ __forceinline__ int key() const { return seen_.tile * kBlockKeys; }
  __device__ __forceinline__ bool mask_hides() const { return seen_.is_partial(); }

 private:
  SeenTiles<> seen_;
};

template <bool first, class A, class B>
struct ConditionalType {
  using Type = A;
};
template <class A, class B>
struct ConditionalType<false, A, B> {
  using Type = B;
};
template <bool first, class A, class B>
using Conditional = typename ConditionalType<first, A, B>::Type;

template <bool of_q, bool maps, class Params>
struct TileWalkIf {
  using Type = TilesOfKeys;
};
template <class Params>
struct TileWalkIf<true, false, Params> {
  using Type = TilesOfRows;
};
template <class Params>
struct TileWalkIf<true, true, Params> {
  using Type = TilesOfMap<Params>;
};

// The score tiles of a CTA in the order in which it computes them: one is a step.
class TileWalk : public TileWalkIf<kOfQ != 0, kMapsTiles != 0, BackwardParams>::Type {
 public:
  using Base = TileWalkIf<kOfQ != 0, kMapsTiles != 0, BackwardParams>::Type;
  using Base::Base;
  // Whether some row of the tile does not see some of its keys.
  __device__ __forceinline__ bool is_masked(const BackwardParams& p, const Lengths& n) const {
    const int row = Base::row(), key = Base::key();
    const KeyRange seen = keys_seen_by_all(band_of(p), n, row, min(row + kBlockRows, n.sq) - 1);
    return Base::mask_hides() || is_partial(seen, key, key + kBlockKeys);
  }
  // The index of the first row in the statistics.
  __device__ __forceinline__ long long statistics(const BackwardParams& p, const Own& own) const {
    return Base::head() * (long long)(p.statistics_rows) + statistics_row(own.n, kPacked, own.batch, p.sq) +
           Base::row();
  }
};
