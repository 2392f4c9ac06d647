// K and V on their way into the buffers of a warp group.
#pragma once
#include "sm90/decode/query.cuh"

enum : int {
  kHeadPanels = (kHeadDim + 63) / 64,
  kValuePanels = (kValueDim + 63) / 64,
  kPanelBytes = kBlockKeys * 128,
  // How often a buffer of a warpgroup path is filled: by one lane for all that TMA brings, or by each lane that copies.
  kFills = kBoxKeys > 0 ? 1 : 32 * kTileWarps,
  // Rows that a lane copies of, every fourth one: eight lanes copy 128 bytes of a row.
  kLoadRows = kBlockKeys / (4 * kTileWarps),
  // Of these, so many are in one page for certain, and equally far apart in memory.
  kRunRows = kPage == 0 ? int(kLoadRows) : kPage % 16 == 0 && !kLeftPad ? min_of(kLoadRows, 4) : 1,
};

// Of a warpgroup path, from its first byte on.
using KBuffers = Buffers<kLayout.k, kLayout.k_bytes, kLayout.k_full, kLayout.k_empty, kKStages>;
using VBuffers = Buffers<kLayout.v, kLayout.v_bytes, kLayout.v_full, kLayout.v_empty, kVStages>;

// Bytes of the 16 from column `column` on that a row of `dim` columns has.
__device__ __forceinline__ u32 bytes_of_chunk(int column, int dim) { return min(max(dim - column, 0), 8) * 2; }

// The loads of a warp whose lanes copy, which run ahead of the products over all work tiles: a tile of its warp group
// at a time.
class LaneLoader {
 public:
  // The warp is one of kTileWarps.
  __device__ __forceinline__ LaneLoader(const DecodeParams& p, const TileWalk& tiles, int tile_warp)
      : p_(p), tiles_(tiles) {
    const u32 lane = threadIdx.x % 32;
    row_ = 4 * kLoadRows * tile_warp + lane / 8;
    column_ = 8 * (lane % 8);
    if (more()) fetch_ids();
  }

  __device__ __forceinline__ const TileWalk& tiles() const { return tiles_; }
  // Whether there is a tile to load.
  __device__ __forceinline__ bool more() const { return tiles_.more(); }

  // Whether this tile has all rows, and as many columns as are computed with.
  __device__ __forceinline__ bool whole() const {
    bool whole = kWholeColumns;
#pragma unroll
    for (int i = 0; i < kLoadRows; ++i) whole = whole && is_there(i);
    return __all_sync(0xffffffff, whole);
  }

  // Starts the loads of this lane's part of the tile.
  template <bool whole>
  __device__ __forceinline__ void copy_keys(u32 to) const {
    copy_rows<kHeadDim, whole>(p_.k, p_.d, to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to) const {
    copy_rows<kValueDim, whole>(p_.v, p_.dv, to);
  }

  // Goes to the next tile.
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (more()) fetch_ids();
  }

 private:
  // The key of this lane's i-th row, from the first of the sequence on.
  __device__ __forceinline__ int key(int i) const { return tiles_.tile() * kBlockKeys + row_ + 4 * i; }

  // Page ids come one tile ahead of the loads that need them.
  __device__ __forceinline__ void fetch_ids() {
    if (kPage == 0) return;
    const DecodeSequence& s = tiles_.item().sequence;
    const int* const ids = page_ids(p_, tiles_.item());
#pragma unroll
    for (int i = 0; i < kLoadRows; i += kRunRows)
      ids_[i / kRunRows] = key(i) < s.n.sk ? ids[(s.n.k_start + key(i)) / max_of(kPage, 1)] : -1;
  }

  // Where the lane's i-th row lies in K or V.
  __device__ __forceinline__ const unsigned short* row(const StridedTensor& t, int i) const {
    const WorkTile& item = tiles_.item();
    const DecodeSequence& s = item.sequence;
    const long long entry = kPage > 0 ? ids_[i / kRunRows] : kPackedK ? 0 : s.entry;
    const int row = kPage > 0 ? (s.n.k_start + key(i)) % max_of(kPage, 1) : s.n.k_start + key(i);
    return t.data + entry * t.batch + row * t.row + item.head * t.head + column_;
  }

  __device__ __forceinline__ bool is_there(int i) const {
    return key(i) < tiles_.item().sequence.n.sk && (kPage == 0 || u32(ids_[i / kRunRows]) < u32(p_.pages.entries));
  }

  template <int columns, bool whole>
  __device__ __forceinline__ void copy_rows(const StridedTensor& t, int dim, u32 to) const {
    const u32 first = to + swizzled(row_, column_ / 8);  // four rows on, a chunk is where it was but for bit 6
    const unsigned short* from = nullptr;
#pragma unroll
    for (int i = 0; i < kLoadRows; ++i) {
      from = i % kRunRows == 0 ? row(t, i) : from + 4 * t.row;
      const bool there = whole || is_there(i);
      copy_row<columns, whole>((first ^ (i % 2 * 64)) + i * 512, there ? from : t.data, there ? dim : 0);
    }
  }

  // This lane's columns of a row, of which `dim` exist.
  template <int columns, bool whole>
  __device__ __forceinline__ void copy_row(u32 to, const unsigned short* from, int dim) const {
#pragma unroll
    for (int panel = 0; panel < (columns + 63) / 64; ++panel) {
      if (64 * panel + 64 > columns && 64 * panel + column_ >= columns) continue;
      if (whole) {
        async_copy16(to + panel * kPanelBytes, from + 64 * panel);
      } else {
        const u32 bytes = bytes_of_chunk(64 * panel + column_, dim);
        async_copy16(to + panel * kPanelBytes, bytes > 0 ? from + 64 * panel : from, bytes);
      }
    }
  }

  const DecodeParams& p_;
  TileWalk tiles_;
  int row_, column_;
  int ids_[kLoadRows / kRunRows];
};

// All loads of a warpgroup path by warps whose lanes copy, and do nothing else; of warp group 0, Q, too.
__device__ __forceinline__ void load_by_lanes(const DecodeParams& p, LaneLoader load, u32 buffers) {
  KBuffers keys(buffers, 1);
  VBuffers values(buffers, 1);
  QueryLoader query(load.tiles());
#pragma unroll 1
  for (; load.more(); load.next()) {
    if (load.tiles().begins_tile() && load.tiles().warp_group() == 0)
      query.begin_tile(p, load.tiles(), threadIdx.x % (32 * kTileWarps));
    const bool whole = load.whole();
    keys.wait_empty();
    if (whole)
      load.copy_keys<true>(keys.address());
    else
      load.copy_keys<false>(keys.address());
    async_copy_arrive(keys.full());
    keys.advance();
    values.wait_empty();
    if (whole)
      load.copy_values<true>(values.address());
    else
      load.copy_values<false>(values.address());
    async_copy_arrive(values.full());
    values.advance();
  }
}

// The ids of the pages of a work tile as a warp reads them, far ahead: what it asks for lies after all that TMA has
// been asked for, and comes after 10 000 cycles and more. Each lane has one of 32 that follow each other, and of the
// next 32.
class PageIds {
 public:
  // Of the q block that `tiles` is at, whose pages from `page` on the work tile needs.
  __device__ __forceinline__ void begin(const DecodeParams& p, const WorkTile& item, int page) {
    const DecodeSequence& s = item.sequence;
    ids_ = page_ids(p, item);
    count_ = (s.n.k_start + s.n.sk + kPage - 1) / max_of(kPage, 1);
    first_ = page / 32 * 32;
    here_ = load(first_);
    next_ = load(first_ + 32);
  }
  // That of a page of a tile, which each lane may choose: none after the last one. The tile has keys of the pages
  // `first` to `last`; both grow, by less than 32.
  __device__ __forceinline__ int id(int page, int first, int last) {
    if (first >= first_ + 32) {
      first_ += 32;
      here_ = next_;
      next_ = load(first_ + 32);
    }
    const int here = __shfl_sync(0xffffffff, here_, page % 32);
    if (last < first_ + 32) return here;  // the next ones need not be there
    const int next = __shfl_sync(0xffffffff, next_, page % 32);
    return page < first_ + 32 ? here : next;
  }

 private:
  __device__ __forceinline__ int load(int first) const {
    const int page = first + int(threadIdx.x % 32);
    return page < count_ ? ids_[page] : -1;
  }

  const int* ids_;
  int count_;  // pages that have keys of the sequence
  int first_, here_, next_;
};

// The loads of K or of V of a warpgroup path by TMA, which one warp asks for: a lane for each box of kBoxKeys rows of a
// panel. The panels of the same rows follow each other, while the memory has these open.
template <int panels>
class BoxLoader {
 public:
  __device__ __forceinline__ BoxLoader(const DecodeParams& p, const TileWalk& tiles) : p_(p), tiles_(tiles) {
    if (tiles_.more()) fetch_id(true);
  }

  __device__ __forceinline__ const TileWalk& tiles() const { return tiles_; }
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (tiles_.more()) fetch_id(tiles_.begins_tile());
  }

  __device__ __forceinline__ void copy(const TensorMapBlob& map, u32 to, u32 barrier) const {
    if (lane() == 0) mbarrier_arrive_expect(barrier, panels * kPanelBytes);
    if (box() >= kBoxes) return;
    const int panel = lane() % panels;
    tma_load(to + panel * kPanelBytes + box() * kBoxKeys * 128, &map, barrier,
             {64 * panel, row_, tiles_.item().head, entry_}, Keep::kShort);
  }

 private:
  enum : int { kBoxes = kBlockKeys / max_of(kBoxKeys, 1) };
  static_assert(kBoxKeys == 0 || kBoxes * panels <= 32);

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int box() { return lane() / panels; }

  // Where this lane's box is, a tile ahead of its load. Outside of the tensor, TMA writes zeros.
  __device__ __forceinline__ void fetch_id(bool begins) {
    const DecodeSequence& s = tiles_.item().sequence;
    const int key = tiles_.tile() * kBlockKeys + box() * kBoxKeys;
    row_ = s.n.k_start + key;
    entry_ = kPackedK ? 0 : s.entry;
    if (kPage == 0) return;
    const int from = s.n.k_start + tiles_.tile() * kBlockKeys;
    if (begins) ids_.begin(p_, tiles_.item(), from / max_of(kPage, 1));
    const int id =
        ids_.id(row_ / max_of(kPage, 1), from / max_of(kPage, 1), (from + kBlockKeys - 1) / max_of(kPage, 1));
    entry_ = key < s.n.sk ? id : -1;
    row_ %= max_of(kPage, 1);
  }

  const DecodeParams& p_;
  TileWalk tiles_;
  PageIds ids_;
  int row_, entry_;
};

__device__ __forceinline__ void load_keys_by_boxes(const DecodeParams& p, BoxLoader<kHeadPanels> load, u32 buffers) {
  KBuffers keys(buffers, 1);
#pragma unroll 1
  for (; load.tiles().more(); load.next()) {
    keys.wait_empty();
    load.copy(p.k_map, keys.address(), keys.full());
    keys.advance();
  }
}

// And of warp group 0, Q, where no warps are left for it.
__device__ __forceinline__ void load_values_by_boxes(const DecodeParams& p, BoxLoader<kValuePanels> load, u32 buffers) {
  VBuffers values(buffers, 1);
  QueryLoader query(load.tiles());
  const u32 tail = buffers + kLayout.v_tail;
  u32 tail_parity = 0;
#pragma unroll 1
  for (; load.tiles().more(); load.next()) {
    if (kTileWarps == 2 && load.tiles().begins_tile() && load.tiles().warp_group() == 0)
      query.begin_tile(p, load.tiles(), threadIdx.x % 32);
    values.wait_empty();
    // Rows of V after the sequence meet P = 0, and 0 * NaN is NaN. Where they are not TMA's zeros, clear them.
    const int valid = load.tiles().item().sequence.n.sk - load.tiles().tile() * kBlockKeys;
    const bool clear = (kPackedK || kSeqUsedK || kPage > 0) && valid < kBlockKeys;
    load.copy(p.v_map, values.address(), clear ? tail : values.full());
    if (clear) {
      mbarrier_wait(tail, tail_parity);
      tail_parity ^= 1;
#pragma unroll 1
      for (int panel = 0; panel < kValuePanels; ++panel)
        for (int at = valid * 128 + 16 * int(threadIdx.x % 32); at < kPanelBytes; at += 512)
          store_shared_zero16(values.address() + panel * kPanelBytes + at);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(values.full());
    }
    values.advance();
  }
}

// The tiles of a warp group, one after the other, as its warps see them: K and V of each where and when they are there.
template <bool wide>
class Tiles;

// Warps that load for themselves.
template <>
class Tiles<false> {
 public:
  __device__ __forceinline__ Tiles(LaneLoader load, u32 buffers) : load_(load), buffers_(buffers) {
    // Where all wait for the first tile, the second one finds its instructions in the cache.
#pragma unroll kSplitting == kSplitToFill ? 1 : kAhead
    for (int tile = 0; tile < kAhead; ++tile) start();
  }

  // `sync` is a barrier of the warp group.
  template <class Sync>
  __device__ __forceinline__ u32 keys(Sync sync) {
    async_copy_wait<kAhead - 1>();
    sync();
    start();
    return buffers_ + kLayout.k + stage_ * kLayout.k_bytes;
  }
  __device__ __forceinline__ u32 values() const { return buffers_ + kLayout.v + stage_ * kLayout.v_bytes; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) stage_ = 0;
  }

 private:
  enum : int { kStages = kKStages, kAhead = kStages - 1 };
  static_assert(kWarpgroupPath || kKStages == kVStages);

  // The loads of the next tile, of which there may be none, are one group.
  __device__ __forceinline__ void start() {
    if (load_.more()) {
      const u32 k = buffers_ + kLayout.k + free_ * kLayout.k_bytes;
      const u32 v = buffers_ + kLayout.v + free_ * kLayout.v_bytes;
      if (load_.whole()) {
        load_.copy_keys<true>(k);
        load_.copy_values<true>(v);
      } else {
        load_.copy_keys<false>(k);
        load_.copy_values<false>(v);
      }
      load_.next();
    }
    async_copy_commit();
    if (++free_ == kStages) free_ = 0;
  }

  LaneLoader load_;
  u32 buffers_;
  int stage_ = 0, free_ = 0;
};

// A warpgroup path's: other warps load them.
template <>
class Tiles<true> {
 public:
  __device__ __forceinline__ explicit Tiles(u32 buffers) : keys_(buffers, 0), values_(buffers, 0) {}

  __device__ __forceinline__ u32 keys() const {
    keys_.wait_full();
    if (kBoxKeys == 0) fence_async_proxy();
    return keys_.address();
  }
  __device__ __forceinline__ void release_keys() { keys_.release(threadIdx.x % 32 == 0); }
  __device__ __forceinline__ u32 values() const {
    values_.wait_full();
    if (kBoxKeys == 0) fence_async_proxy();
    return values_.address();
  }
  __device__ __forceinline__ void release_values() { values_.release(threadIdx.x % 32 == 0); }

 private:
  KBuffers keys_;
  VBuffers values_;
};

