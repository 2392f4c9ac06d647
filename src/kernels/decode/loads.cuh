// Loads of K and V by cp.async: the lanes of a warp copy rows of any strides and of any pages.
#pragma once
#include "device/cp_async.cuh"
#include "decode/query.cuh"
#include "decode/tile_walk.cuh"

enum : int {
  kKPanels = panels_of(StoredK::kType, kHeadDim),
  kVPanels = panels_of(StoredV::kType, kValueDim),
  kPanelBytes = kBlockKeys * kPanelRowBytes,  // of elements that are no codes
  kKRowBytes = panel_row_bytes(StoredK::kType, kHeadDim),
  kVRowBytes = panel_row_bytes(StoredV::kType, kValueDim),
  // Lanes that copy a row of a panel together, 16 bytes each, and rows that a warp copies at once.
  kRowLanes = max_of(kKRowBytes, kVRowBytes) / 16,
  kRowsAtOnce = 32 / kRowLanes,
};

// The tensors of scales that a tile of codes has with it: so many numbers of a key each. In shared memory they follow
// each other, and in each its keys.
enum : int { kOfK, kOfV, kZeroOfK, kZeroOfV };
__device__ constexpr int scale_count(int tensor) {
  const int count = tensor % 2 == 0 ? kKScales : kVScales;
  return tensor == kZeroOfK ? count * kKZeroPoint : tensor == kZeroOfV ? count * kVZeroPoint : count;
}
__device__ constexpr int scales_before(int tensor) {
  return tensor == 0 ? 0 : scales_before(tensor - 1) + scale_count(tensor - 1);
}
template <int tensor>
__device__ __forceinline__ u32 scale_place(u32 scales, int key, int group) {
  return scales + 4 * (scales_before(tensor) * kBlockKeys + key * scale_count(tensor) + group);
}

// Where chunk `chunk` of a row of a panel lies whose rows have so many bytes.
template <int row_bytes>
__device__ __forceinline__ u32 chunk_place(u32 row, u32 chunk) {
  if (row_bytes == 128) return swizzled(row, chunk);
  const u32 at = row * (row_bytes / 16) + chunk;
  return 16 * (at ^ (at / 8 & (row_bytes / 16 - 1)));
}

// Loads by the lanes of a warp, a tile of its warp group at a time. `warps` warps share the rows of a tile.
template <int warps>
class LaneLoader {
 public:
  // This warp is number `warp` of them.
  __device__ __forceinline__ LaneLoader(const DecodeParams& p, const TileWalk& tiles, int warp) : p_(p), tiles_(tiles) {
    const u32 lane = threadIdx.x % 32;
    row_ = kRowsAtOnce * kRows * warp + lane / kRowLanes;
    column_ = 8 * (lane % kRowLanes);
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
    copy_rows<StoredK, kHeadDim, whole>(p_.k, p_.d, to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to) const {
    copy_rows<StoredV, kValueDim, whole>(p_.v, p_.dv, to);
  }

  enum : int {
    kRows = kBlockKeys / (kRowsAtOnce * warps),  // that a lane copies of
  };
  enum : int {
    kScaleKeys = (kBlockKeys / warps + 31) / 32,  // keys of a tile whose scales a lane loads
    kHalfBits = 4 * kScaleKeys,                   // that copy_scales returns
  };
  // Starts the loads of the scales of this lane's keys of the tile, as memory has them; 0 where they are not there.
  // Returns for which keys and tensors a word of 4 bytes begins in the middle of one of memory.
  __device__ __forceinline__ u32 copy_scales(u32 to) const {
    const DecodeSequence& s = tiles_.work_tile().sequence;
    u32 halves = 0;
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      if (scale_key(i) < 0) continue;
      const int key = tiles_.tile() * kBlockKeys + scale_key(i);
      const bool there = key < s.n.sk && (kPage == 0 || u32(scale_ids_[i]) < u32(p_.pages.entries));
      const long long entry = kPage > 0 ? scale_ids_[i] : kPackedK ? 0 : s.entry;
      const int row = kPage > 0 ? (s.n.k_start + key) % max_of(kPage, 1) : s.n.k_start + key;
      const KeyInMemory from = {scale_key(i), there, entry, row};
      halves |= (copy_scales_of<kOfK>(p_.k_scale, from, to) | copy_scales_of<kOfV>(p_.v_scale, from, to) |
                 copy_scales_of<kZeroOfK>(p_.k_zero_point, from, to) |
                 copy_scales_of<kZeroOfV>(p_.v_zero_point, from, to))
                << 4 * i;
    }
    return halves;
  }
  // Those of f16 become f32, once the copies of this lane are there.
  __device__ __forceinline__ void widen_scales(u32 halves, u32 scales) const {
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i, halves >>= 4) {
      if (scale_key(i) < 0) continue;
      widen_scales_of<kOfK>(p_.k_scale, halves, scale_place<kOfK>(scales, scale_key(i), 0));
      widen_scales_of<kOfV>(p_.v_scale, halves, scale_place<kOfV>(scales, scale_key(i), 0));
      widen_scales_of<kZeroOfK>(p_.k_zero_point, halves, scale_place<kZeroOfK>(scales, scale_key(i), 0));
      widen_scales_of<kZeroOfV>(p_.v_zero_point, halves, scale_place<kZeroOfV>(scales, scale_key(i), 0));
    }
  }

  // Goes to the next tile.
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (more()) fetch_ids();
  }

 private:
  enum : int {
    // Of a lane's rows, so many are in one page for certain, and equally far apart in memory.
    kRunRows = kPage == 0 ? int(kRows) : kPage % 16 == 0 && !kLeftPad ? min_of(kRows, max_of(16 / kRowsAtOnce, 1)) : 1,
  };

  // The key of this lane's i-th row, from the first of the sequence on.
  __device__ __forceinline__ int key(int i) const { return tiles_.tile() * kBlockKeys + row_ + kRowsAtOnce * i; }

  // Page ids come one tile ahead of the loads that need them.
  __device__ __forceinline__ void fetch_ids() {
    if (kPage == 0) return;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int* const ids = page_ids(p_, tiles_.work_tile());
#pragma unroll
    for (int i = 0; i < kRows; i += kRunRows)
      ids_[i / kRunRows] = key(i) < s.n.sk ? page_id(p_, ids, (s.n.k_start + key(i)) / max_of(kPage, 1)) : -1;
    if (kScalesOfKey == 0) return;
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      const int of_scales = tiles_.tile() * kBlockKeys + max(scale_key(i), 0);
      scale_ids_[i] = of_scales < s.n.sk ? page_id(p_, ids, (s.n.k_start + of_scales) / max_of(kPage, 1)) : -1;
    }
  }

  // Where the lane's i-th row lies in K or V.
  template <class Type>
  __device__ __forceinline__ const typename Type::Memory* row(const StridedTensor& t, int i) const {
    const WorkTile& tile = tiles_.work_tile();
    const DecodeSequence& s = tile.sequence;
    const long long entry = kPage > 0 ? ids_[i / kRunRows] : kPackedK ? 0 : s.entry;
    const int row = kPage > 0 ? (s.n.k_start + key(i)) % max_of(kPage, 1) : s.n.k_start + key(i);
    return static_cast<const typename Type::Memory*>(t.data) + entry * t.batch + row * t.row + tile.head * t.head +
           column_ * int(2 / sizeof(typename Type::Memory));
  }

  // The i-th key of a tile whose scales this lane loads; -1: it has none.
  __device__ __forceinline__ int scale_key(int i) const {
    constexpr int kKeys = kBlockKeys / warps;
    const int lane = threadIdx.x % 32;
    return kKeys >= 32 || lane < kKeys ? row_ / (kRowsAtOnce * kRows) * kKeys + 32 * i + lane : -1;
  }
  // Where memory has a key of a tile.
  struct KeyInMemory {
    int key;
    bool there;
    long long entry;
    int row;
  };

  // A run comes as it is. Else each number has a word, a number of f16 the one of 4 bytes that it is a half of; returns
  // the bit of the tensor where that is the upper half of the first one. A number of f16 that all keys have may be all
  // of its memory: it is loaded, and after the first key it is in the L1 cache.
  template <int tensor>
  __device__ __forceinline__ u32 copy_scales_of(const CodeScales& t, const KeyInMemory& from, u32 to) const {
    constexpr int kCount = scale_count(tensor);
    if (kCount == 0) return 0;
    const WorkTile& tile = tiles_.work_tile();
    const int bytes = t.type == kF32 ? 4 : 2;
    const long long first =
        (t.of_rows ? from.entry : tile.batch) * t.batch + from.row * t.row + tile.head * t.head;
    unsigned long long at = reinterpret_cast<unsigned long long>(t.data) + (from.there ? first * bytes : 0);
    const u32 place = scale_place<tensor>(to, from.key, 0);
    if (t.runs) {
      if (t.type == kF32)
        copy_run<4 * kCount>(place, at, from.there);
      else
        copy_run<2 * kCount>(place, at, from.there);
      return 0;
    }
    if (!t.of_rows && t.type != kF32) {
      store_shared(place, int(*reinterpret_cast<const unsigned short*>(at)));
      return 0;
    }
    const u32 upper = at >> 1 & 1;
    const long long step = from.there ? t.group * bytes : 0;
#pragma unroll
    for (int group = 0; group < kCount; ++group, at += step)
      async_copy4(place + 4 * group, reinterpret_cast<const void*>(at & ~2ull), !from.there ? 0 : at & 2 ? 4 : bytes);
    return upper << tensor;
  }
  template <int bytes>
  static __device__ __forceinline__ void copy_run(u32 to, unsigned long long at, bool there) {
    constexpr int kPiece = max_of(scale_piece(bytes), 4);
#pragma unroll
    for (int i = 0; i < bytes / kPiece; ++i)
      async_copy_piece<kPiece>(to + kPiece * i, reinterpret_cast<const void*>(at + kPiece * i), there);
  }

  template <int tensor>
  __device__ __forceinline__ void widen_scales_of(const CodeScales& t, u32 halves, u32 place) const {
    constexpr int kCount = scale_count(tensor);
    if (kCount == 0 || t.type == kF32) return;
    float x[max_of(kCount, 1)];
    bool upper = !t.runs && (halves >> tensor & 1);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32 word = load_shared(place + 4 * (t.runs ? i / 2 : i));
      x[i] = (t.runs ? i % 2 : upper) ? Half::high(word) : Half::low(word);
      upper ^= t.group & 1;
    }
    if constexpr (kCount % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) store_shared_four(place + 4 * i, x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) store_shared(place + 4 * i, __float_as_int(x[i]));
    }
  }

  __device__ __forceinline__ bool is_there(int i) const {
    return key(i) < tiles_.work_tile().sequence.n.sk && (kPage == 0 || u32(ids_[i / kRunRows]) < u32(p_.pages.entries));
  }

  template <class Type, int columns, bool whole>
  __device__ __forceinline__ void copy_rows(const StridedTensor& t, int dim, u32 to) const {
    constexpr int kRowBytes = panel_row_bytes(Type::kType, columns);
    // A step of rows is so many lines of 128 bytes, by which the place of a chunk changes in a line.
    constexpr int kLines = kRowsAtOnce * kRowBytes / 128;
    if (kRowBytes < 16 * kRowLanes && column_ >= kRowBytes / 2) return;
    const u32 first = to + chunk_place<kRowBytes>(row_, column_ / 8);
    const typename Type::Memory* from = nullptr;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      from = i % kRunRows == 0 ? row<Type>(t, i) : from + kRowsAtOnce * t.row;
      const bool there = whole || is_there(i);
      copy_row<Type, columns, whole>((first ^ 16 * (i * kLines & (kRowBytes / 16 - 1))) + i * kLines * 128,
                                     there ? from : static_cast<const typename Type::Memory*>(t.data),
                                     there ? dim : 0);
    }
  }

  // This lane's columns of a row, of which `dim` exist.
  template <class Type, int columns, bool whole>
  __device__ __forceinline__ void copy_row(u32 to, const typename Type::Memory* from, int dim) const {
    constexpr int kOfPanel = Type::kPanelColumns, kOfChunk = chunk_columns(Type::kType);
    constexpr int kStep = kPanelRowBytes / sizeof(typename Type::Memory);
    constexpr int kBytes = kBlockKeys * panel_row_bytes(Type::kType, columns);
#pragma unroll
    for (int panel = 0; panel < panels_of(Type::kType, columns); ++panel) {
      const int column = kOfPanel * panel + kOfChunk * (column_ / 8);
      if (kOfPanel * panel + kOfPanel > columns && column >= columns) continue;
      if (whole) {
        async_copy16(to + panel * kBytes, from + kStep * panel);
      } else {
        const u32 bytes = bytes_of_chunk(bits_of(Type::kType), column, dim);
        async_copy16(to + panel * kBytes, bytes > 0 ? from + kStep * panel : from, bytes);
      }
    }
  }

  const DecodeParams& p_;
  TileWalk tiles_;
  int row_, column_;  // of 16-bit elements
  int ids_[kRows / kRunRows];
  int scale_ids_[kScaleKeys];  // of the pages of scale_key()
};
