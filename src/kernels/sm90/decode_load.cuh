// K and V on their way into the buffers of a team, and Q into its place.
#pragma once
#include "shared/async_copy.cuh"
#include "shared/buffers.cuh"
#include "shared/fragment_store.cuh"
#include "shared/tma.cuh"
#include "sm90/decode_items.cuh"

enum : int {
  kPanelBytes = kBlockKeys * 128,
  kTileWarps = kWide ? kLoadWarps / kTeams : kTeamWarps,  // that load a tile
  // Rows that a lane copies of, every fourth one: eight lanes copy 128 bytes of a row.
  kLoadRows = kBlockKeys / (4 * kTileWarps),
  // Of these, so many are in one page for certain, and equally far apart in memory.
  kRunRows = kPage == 0 ? int(kLoadRows) : kPage % 16 == 0 && !kLeftPad ? least(kLoadRows, 4) : 1,
};

// Of a wide team, from its first byte on.
using KBuffers = Buffers<kLayout.k, kLayout.k_bytes, kLayout.k_full, kLayout.k_empty, kKStages>;
using VBuffers = Buffers<kLayout.v, kLayout.v_bytes, kLayout.v_full, kLayout.v_empty, kVStages>;

// Where chunk `chunk` of 16 bytes lies in a panel's row: no two rows of eight have a chunk in the same banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ row) % 8 << 4); }

// Bytes of the 16 from column `column` on that a row of `dim` columns has.
__device__ __forceinline__ u32 bytes_of_chunk(int column, int dim) { return min(max(dim - column, 0), 8) * 2; }

// The loads of a warp, which run ahead of the products over all items: a tile of its team at a time.
class DecodeLoader {
 public:
  // `items` is at the first item, if there are `more`. The warp is one of kTileWarps.
  __device__ __forceinline__ DecodeLoader(const DecodeParams& p, const Share& share, const DecodeItems& items,
                                          bool more, int team, int tile_warp)
      : p_(p), share_(share), items_(items), more_(more), team_(team) {
    const u32 lane = threadIdx.x % 32;
    row_ = 4 * kLoadRows * tile_warp + lane / 8;
    column_ = 8 * (lane % 8);
    tile_ = items_.item.begin + team_;
    if (more_) begin_tile();
  }

  // Whether there is a tile to load.
  __device__ __forceinline__ bool more() const { return more_; }

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
    tile_ += kTeams;
    begin_tile();
  }

 private:
  // Goes to the next item that has a tile for this team, where this one has no more.
  __device__ __forceinline__ void begin_tile() {
    while (tile_ >= items_.item.end) {
      more_ = items_.next(p_, share_);
      if (!more_) return;
      tile_ = items_.item.begin + team_;
    }
    fetch_ids();
  }

  // The key of this lane's i-th row, from the first of the sequence on.
  __device__ __forceinline__ int key(int i) const { return tile_ * kBlockKeys + row_ + 4 * i; }

  // Page ids come one tile ahead of the loads that need them.
  __device__ __forceinline__ void fetch_ids() {
    if (kPage == 0) return;
    const DecodeSequence& s = items_.item.sequence;
    const int* const ids = p_.pages.table + (kPageLists ? s.entry : items_.item.batch * p_.pages.table_stride);
#pragma unroll
    for (int i = 0; i < kLoadRows; i += kRunRows)
      ids_[i / kRunRows] = key(i) < s.n.sk ? ids[(s.n.k_start + key(i)) / most(kPage, 1)] : -1;
  }

  // Where the lane's i-th row lies in K or V.
  __device__ __forceinline__ const unsigned short* row(const StridedTensor& t, int i) const {
    const DecodeItem& item = items_.item;
    const DecodeSequence& s = item.sequence;
    const long long entry = kPage > 0 ? ids_[i / kRunRows] : kPackedK ? 0 : s.entry;
    const int row = kPage > 0 ? (s.n.k_start + key(i)) % most(kPage, 1) : s.n.k_start + key(i);
    return t.data + entry * t.batch + row * t.row + item.head * t.head + column_;
  }

  __device__ __forceinline__ bool is_there(int i) const {
    return key(i) < items_.item.sequence.n.sk && (kPage == 0 || u32(ids_[i / kRunRows]) < u32(p_.pages.entries));
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
  const Share& share_;
  DecodeItems items_;
  bool more_;
  int team_, tile_;
  int row_, column_;
  int ids_[kLoadRows / kRunRows];
};

// All loads of a wide team, by warps that do nothing else.
__device__ __forceinline__ void load_tiles(DecodeLoader load, u32 buffers) {
  KBuffers keys(buffers, 1);
  VBuffers values(buffers, 1);
#pragma unroll 1
  for (; load.more(); load.next()) {
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

// The tiles of a team, one after the other, as its warps see them: K and V of each where and when they are there.
template <bool wide>
class Tiles;

// Warps that load for themselves.
template <>
class Tiles<false> {
 public:
  __device__ __forceinline__ Tiles(DecodeLoader load, u32 buffers) : load_(load), buffers_(buffers) {
#pragma unroll
    for (int tile = 0; tile < kAhead; ++tile) start();
  }

  // `sync` is a barrier of the team.
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
  static_assert(kWide || kKStages == kVStages);

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

  DecodeLoader load_;
  u32 buffers_;
  int stage_ = 0, free_ = 0;
};

// A wide team's: other warps load them.
template <>
class Tiles<true> {
 public:
  __device__ __forceinline__ explicit Tiles(u32 buffers) : keys_(buffers, 0), values_(buffers, 0) {}

  __device__ __forceinline__ u32 keys() const {
    keys_.wait_full();
    fence_async_proxy();
    return keys_.address();
  }
  __device__ __forceinline__ void release_keys() { keys_.release(threadIdx.x % 32 == 0); }
  __device__ __forceinline__ u32 values() const {
    values_.wait_full();
    fence_async_proxy();
    return values_.address();
  }
  __device__ __forceinline__ void release_values() { values_.release(threadIdx.x % 32 == 0); }

 private:
  KBuffers keys_;
  VBuffers values_;
};

// Rows of an item: of a kv head, (query, head of its group).
struct ItemRows {
  int first, count;
};

__device__ __forceinline__ ItemRows rows_of_item(const DecodeParams& p, const DecodeItem& item) {
  const int first = item.block * kBlockRows;
  return {first, min(item.sequence.n.sq * kGroup - first, int(kBlockRows))};
}

__device__ __forceinline__ unsigned short* item_row(const DecodeParams& p, const StridedTensor& t,
                                                    const DecodeItem& item, int row) {
  return row_of(t, item.batch, item.sequence.n.q_start + row / kGroup, item.head * kGroup + row % kGroup);
}

// Q of an item, zeros where there is none: 16 bytes at a time, by all threads, through registers. Where these are few
// it is on its way before the item begins.
class DecodeQuery {
 public:
  __device__ __forceinline__ void fetch(const DecodeParams& p, const DecodeItem& item) {
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) chunks_[i] = chunk(p, item, i);
    }
  }

  __device__ __forceinline__ void store(const DecodeParams& p, const DecodeItem& item, unsigned char* shared) const {
#pragma unroll(kAhead ? kOfThread : kQWhole ? (kHeadDim <= 128 ? 8 : 4) : 2)
    for (int i = 0; i < kOfThread; ++i) {
      const int row = at(i) / kChunks;
      const int column = at(i) % kChunks * 8;
      if (row < kBlockRows)
        *reinterpret_cast<uint4*>(shared + kLayout.q + column / 64 * kBlockRows * 128 +
                                  swizzled(row, column % 64 / 8)) = kAhead ? chunks_[i] : chunk(p, item, i);
    }
  }

 private:
  enum : int {
    kChunks = kHeadDim / 8,
    kOfThread = (kBlockRows * kChunks + kThreads - 1) / kThreads,
    kAhead = kOfThread <= 2,
  };

  static __device__ __forceinline__ int at(int i) { return threadIdx.x + i * kThreads; }

  // 8 columns of a row.
  static __device__ __forceinline__ uint4 chunk(const DecodeParams& p, const DecodeItem& item, int i) {
    const ItemRows rows = rows_of_item(p, item);
    const int row = at(i) / kChunks;
    const int column = at(i) % kChunks * 8;
    const int count = row < rows.count ? p.d - column : 0;
    const unsigned short* const from = item_row(p, p.q, item, rows.first + row) + column;
    if (kQWhole) return count > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    u32 pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) pairs[i / 2] |= u32(from[i]) << (i % 2 * 16);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  uint4 chunks_[kAhead ? kOfThread : 1];
};
