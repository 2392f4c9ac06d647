// Loads of K and V by cp.async: the lanes of a warp copy rows of any strides and of any pages.
#pragma once
#include "device/cp_async.cuh"
#include "sm90/decode/query.cuh"
#include "sm90/decode/tile_walk.cuh"

enum : int {
  kKPanels = panels_of(ElementK::kType, kHeadDim),
  kVPanels = panels_of(ElementV::kType, kValueDim),
  kPanelBytes = kBlockKeys * kPanelRowBytes,
};

// Loads by the lanes of a warp, a tile of its warp group at a time. `warps` warps share the rows of a tile.
template <int warps>
class LaneLoader {
 public:
  // This warp is number `warp` of them.
  __device__ __forceinline__ LaneLoader(const DecodeParams& p, const TileWalk& tiles, int warp) : p_(p), tiles_(tiles) {
    const u32 lane = threadIdx.x % 32;
    row_ = 4 * kRows * warp + lane / 8;
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
    for (int i = 0; i < kRows; ++i) whole = whole && is_there(i);
    return __all_sync(0xffffffff, whole);
  }

  // Starts the loads of this lane's part of the tile.
  template <bool whole>
  __device__ __forceinline__ void copy_keys(u32 to) const {
    copy_rows<ElementK, kHeadDim, whole>(p_.k, p_.d, to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to) const {
    copy_rows<ElementV, kValueDim, whole>(p_.v, p_.dv, to);
  }

  // Goes to the next tile.
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (more()) fetch_ids();
  }

 private:
  enum : int {
    // Rows that a lane copies of, every fourth one: eight lanes copy 128 bytes of a row.
    kRows = kBlockKeys / (4 * warps),
    // Of these, so many are in one page for certain, and equally far apart in memory.
    kRunRows = kPage == 0 ? int(kRows) : kPage % 16 == 0 && !kLeftPad ? min_of(kRows, 4) : 1,
  };

  // The key of this lane's i-th row, from the first of the sequence on.
  __device__ __forceinline__ int key(int i) const { return tiles_.tile() * kBlockKeys + row_ + 4 * i; }

  // Page ids come one tile ahead of the loads that need them.
  __device__ __forceinline__ void fetch_ids() {
    if (kPage == 0) return;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int* const ids = page_ids(p_, tiles_.work_tile());
#pragma unroll
    for (int i = 0; i < kRows; i += kRunRows)
      ids_[i / kRunRows] = key(i) < s.n.sk ? page_id(p_, ids, (s.n.k_start + key(i)) / max_of(kPage, 1)) : -1;
  }

  // Where the lane's i-th row lies in K or V.
  template <class Type>
  __device__ __forceinline__ const typename Type::Memory* row(const StridedTensor& t, int i) const {
    const WorkTile& tile = tiles_.work_tile();
    const DecodeSequence& s = tile.sequence;
    const long long entry = kPage > 0 ? ids_[i / kRunRows] : kPackedK ? 0 : s.entry;
    const int row = kPage > 0 ? (s.n.k_start + key(i)) % max_of(kPage, 1) : s.n.k_start + key(i);
    return static_cast<const typename Type::Memory*>(t.data) + entry * t.batch + row * t.row + tile.head * t.head +
           column_;
  }

  __device__ __forceinline__ bool is_there(int i) const {
    return key(i) < tiles_.work_tile().sequence.n.sk && (kPage == 0 || u32(ids_[i / kRunRows]) < u32(p_.pages.entries));
  }

  template <class Type, int columns, bool whole>
  __device__ __forceinline__ void copy_rows(const StridedTensor& t, int dim, u32 to) const {
    const u32 first = to + swizzled(row_, column_ / 8);  // four rows on, a chunk is where it was but for bit 6
    const typename Type::Memory* from = nullptr;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      from = i % kRunRows == 0 ? row<Type>(t, i) : from + 4 * t.row;
      const bool there = whole || is_there(i);
      copy_row<Type, columns, whole>((first ^ (i % 2 * 64)) + i * 512,
                                     there ? from : static_cast<const typename Type::Memory*>(t.data),
                                     there ? dim : 0);
    }
  }

  // This lane's columns of a row, of which `dim` exist.
  template <class Type, int columns, bool whole>
  __device__ __forceinline__ void copy_row(u32 to, const typename Type::Memory* from, int dim) const {
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
  int ids_[kRows / kRunRows];
};
