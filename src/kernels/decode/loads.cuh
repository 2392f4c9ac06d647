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
    kScalesOfLane = (kScalesOfKey + kRowLanes - 1) / kRowLanes,  // of each row
    kScalesOfTile = kRows * kScalesOfLane,
  };
  // Starts the loads of the scales of this lane's rows, of which each lane of a row has some, as memory has them; 0 of
  // rows that are not there.
  __device__ __forceinline__ void load_scales(u32 (&x)[max_of(kScalesOfTile, 1)]) const {
    const WorkTile& tile = tiles_.work_tile();
    const DecodeSequence& s = tile.sequence;
#pragma unroll
    for (int j = 0; j < kScalesOfLane; ++j) {
      const LaneScale t = scale_of(column_ / 8 + j * kRowLanes);
      const char* at = nullptr;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i % kRunRows == 0) {
          const long long entry = !t.of_rows ? tile.batch : kPage > 0 ? ids_[i / kRunRows] : kPackedK ? 0 : s.entry;
          const int row = kPage > 0 ? (s.n.k_start + key(i)) % max_of(kPage, 1) : s.n.k_start + key(i);
          at = t.data + entry * t.batch + row * t.row + tile.head * t.head;
        } else {
          at += kRowsAtOnce * t.row;
        }
        u32& to = x[i * kScalesOfLane + j];
        const bool there = t.exists && is_there(i);
        to = 0;
        if (there && !t.half) to = *reinterpret_cast<const u32*>(at);
        if (there && t.half) to = *reinterpret_cast<const unsigned short*>(at);
      }
    }
  }
  // To a tile's scales, as f32.
  __device__ __forceinline__ void store_scales(const u32 (&x)[max_of(kScalesOfTile, 1)], u32 to) const {
#pragma unroll
    for (int i = 0; i < kScalesOfTile; ++i) {
      const int number = column_ / 8 + i % kScalesOfLane * kRowLanes;
      const LaneScale t = scale_of(number);
      if (!t.exists) continue;
      store_shared(to + 4 * (number * kBlockKeys + row_ + i / kScalesOfLane * kRowsAtOnce),
                   t.half ? __float_as_int(half_to_float(static_cast<unsigned short>(x[i]))) : int(x[i]));
    }
  }

  // Goes to the next tile.
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (more()) fetch_ids();
  }

 private:
  // Where the scales lie that a lane loads of its rows; strides in bytes.
  struct LaneScale {
    const char* data;
    long long batch, row, head;
    bool of_rows, half, exists;
  };

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

  // The scale of the lane's rows with this number, in the order of a tile's scales: of K, of V, zero points of K, of V.
  __device__ __forceinline__ LaneScale scale_of(int number) const {
    const bool zero_point = number >= kKScales + kVScales;
    const int of_k = zero_point ? kKScales * kKZeroPoint : int(kKScales);
    const int of = zero_point ? number - kKScales - kVScales : number;
    // Member by member: an address that depends on the lane would make loads of these.
    const auto member = [&](auto of_scales) __attribute__((always_inline)) {
      const auto k = kKZeroPoint && zero_point ? of_scales(p_.k_zero_point) : of_scales(p_.k_scale);
      const auto v = kVZeroPoint && zero_point ? of_scales(p_.v_zero_point) : of_scales(p_.v_scale);
      return of < of_k ? k : v;
    };
    const bool half = member([](const CodeScales& t) { return t.type == kF16; });
    const int bytes = half ? 2 : 4;
    const long long group = of < of_k ? of : of - of_k;
    return {member([](const CodeScales& t) { return static_cast<const char*>(t.data); }) +
                group * member([](const CodeScales& t) { return t.group; }) * bytes,
            member([](const CodeScales& t) { return t.batch; }) * bytes,
            member([](const CodeScales& t) { return t.row; }) * bytes,
            member([](const CodeScales& t) { return t.head; }) * bytes,
            member([](const CodeScales& t) { return t.of_rows; }),
            half,
            number < kScalesOfKey};
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
};
