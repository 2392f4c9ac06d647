// The division of work in a CTA of the portable backward kernels: its warps, its shared memory and its steps.
#pragma once
#include "attention/fragment_store.cuh"
#include "attention/mask.cuh"
#include "attention/seen_tiles.cuh"
#include "backward/layout.cuh"
#include "portable/backward/layout.h"
#include "portable/common/copy_rows.cuh"

__device__ constexpr PortableBackwardLayout kLayout = portable_backward_layout(
    {kOperands, kHeadDim, kValueDim, kBlockRows, kBlockKeys, kStages, kDsStages});

// What a warp computes in a step: everything (keys.cu), or P and dV, or dS and dK (keys_wide.cu).
enum Role : int { kOfBoth, kOfValues, kOfKeys };

enum : int {
  kThreads = 32 * kWarps,
  kRoleThreads = kThreads / kRoles,
  kKeyWarps = kWarps / kRoles / 2,       // of a role, each with its own keys
  kDqGroups = kWarps / 2,                // groups of columns of dQ
  kWarpKeys = kBlockKeys / kKeyWarps,
  kKeyTiles = kWarpKeys / 16,            // tiles of 16 keys per warp
  kHalfRows = kBlockRows / 2,            // rows of a step for which a warp computes P or dS, and dQ
  kRowTiles = kHalfRows / 16,            // tiles of 16 of these rows
  kKeyPanelBytes = kBlockKeys * kPanelRowBytes,
  kRowPanelBytes = kBlockRows * kPanelRowBytes,
  // The warp's keys of K and V stay in registers.
  kKeepsKeys = ElementK::kBytes == 2 && kRoles == 1 && kStages == 3 && kHeadDim <= 64 && kValueDim <= 64,
  // The key blocks of a head may be in descending order.
  kMayDescend = kRoles == 2 && kOrderedDq && kHasRight && !kMapsTiles,
};

// Whether the key blocks of a head are in descending order.
__device__ __forceinline__ bool blocks_descend(const BackwardParams& p) {
  return kMayDescend && p.key_blocks.order == kDescending;
}

// The part of a warp: keys [key, key + kWarpKeys) of the block, half of the rows, and half of the columns of dK and dV.
struct Part {
  int key, half;
  int columns;  // of dQ: the number of one of kDqGroups interleaved groups
};
__device__ __forceinline__ Part part_of_warp() {
  const int warp = uniform(threadIdx.x / 32);
  const int pair = kRoles == 1 ? warp / 2 : warp / 2 % kKeyWarps;
  return {pair * kWarpKeys, warp % 2, warp / 2};
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

// Starts copies of rows [row, row + rows) of a head by the threads of a role. `count` rows exist; the others become 0,
// since they are multiplied with P = 0 or dS = 0, and 0 * NaN is NaN.
template <class Type, int rows, int columns>
__device__ __forceinline__ void start_rows(u32 to, const StridedTensor& t, int dim, int batch, int start, int head,
                                           int row, int count) {
  const typename Type::Memory* const from = row_of<Type>(t, batch, start + row, head);
  const u32 thread = kRoles == 1 ? threadIdx.x : threadIdx.x % kRoleThreads;
  if (row + rows <= count) {
    copy_rows<Type, kRoleThreads, rows, columns, true>(
        to, t.data, dim, [&](int i) { return from + i * t.row; }, thread);
  } else {
    copy_rows<Type, kRoleThreads, rows, columns, false>(
        to, t.data, dim, [&](int i) { return row + i < count ? from + i * t.row : nullptr; }, thread);
  }
}

// The copies of the operands that a role multiplies first, step by step: Q and LSE, dO and D, or all of these.
template <Role role>
class StepLoader {
 public:
  __device__ __forceinline__ StepLoader(const BackwardParams& p, u32 smem, const Keys& keys)
      : p_(p), smem_(smem), keys_(keys), steps_(p, keys) {}

  // Starts the copies of the next step, if there is one.
  __device__ __forceinline__ void start() {
    if (steps_.more()) {
      const u32 to = smem_ + kLayout.stages + stage_ * kLayout.stage_bytes;
      const Lengths& n = keys_.n;
      if constexpr (role != kOfKeys) {
        start_rows<ElementQ, kBlockRows, kHeadDim>(to, p_.q, p_.d, keys_.batch, n.q_start, steps_.head(), steps_.row(),
                                                   n.sq);
      }
      if constexpr (role != kOfValues) {
        start_rows<ElementO, kBlockRows, kValueDim>(to + kLayout.dout, p_.dout, p_.dv, keys_.batch, n.q_start,
                                                    steps_.head(), steps_.row(), n.sq);
      }
      start_statistics();
      steps_.advance();
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }
    async_copy_commit();
  }

 private:
  __device__ __forceinline__ void start_statistics() {
    constexpr int kQuarter = kBlockRows / 4;  // threads that copy LSE, and as many D
    const u32 to = smem_ + kLayout.statistics + stage_ * 8 * kBlockRows;
    if constexpr (role == kOfBoth) {
      const int i = threadIdx.x;
      if (i < 2 * kQuarter) {
        const float* from = (i < kQuarter ? p_.shift : p_.delta) + steps_.statistics(p_, keys_);
        async_copy16(to + 16 * i, from + i % kQuarter * 4);
      }
    } else {
      const int i = threadIdx.x % kRoleThreads;
      if (i < kQuarter) {
        async_copy16(to + (role == kOfKeys ? 4 * kBlockRows : 0) + 16 * i,
                     (role == kOfKeys ? p_.delta : p_.shift) + steps_.statistics(p_, keys_) + 4 * i);
      }
    }
  }

  const BackwardParams& p_;
  u32 smem_;
  const Keys& keys_;
  Steps steps_;
  int stage_ = 0;
};
