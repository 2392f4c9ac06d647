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

// Where numbers of a key lie, side by side.
template <int tensor>
__device__ __forceinline__ u32 scale_place(u32 scales, int key, int group) {
  constexpr int kWords = scale_words(scale_count(tensor), scale_type(tensor));
  return scales + 4 * (scale_words_before(tensor) * kBlockKeys + key * kWords) + group * bytes_of(scale_type(tensor));
}
// And where the word of a row of blocks, of K or of V.
template <int tensor>
__device__ __forceinline__ u32 row_start_place(u32 scales, int key) {
  const int before = scale_words_before(kScaleTensors) + (tensor == kOfV && scales_in_rows(kOfK));
  return scales + 4 * (before * kBlockKeys + key);
}
template <int tensor>
__device__ __forceinline__ float load_scale(u32 scales, int key, int group) {
  const u32 at = scale_place<tensor>(scales, key, group);
  if constexpr (scale_type(tensor) == kF32)
    return __int_as_float(load_shared(at));
  else
    return half_to_float(static_cast<unsigned short>(load_shared_u16(at)));
}
template <int tensor>
class ScalesOfKey {
 public:
  ScalesOfKey() = default;
  __device__ __forceinline__ ScalesOfKey(u32 scales, int key) {
    const u32 at = scale_place<tensor>(scales, key, 0);
#pragma unroll
    for (int i = 0; i < kWords / kPiece; ++i) load_shared_words<kPiece>(at + 4 * kPiece * i, words_ + kPiece * i);
  }
  __device__ __forceinline__ float operator[](int group) const {
    if constexpr (scale_type(tensor) == kF32)
      return __uint_as_float(words_[group]);
    else
      return group % 2 == 0 ? Half::low(words_[group / 2]) : Half::high(words_[group / 2]);
  }

 private:
  enum : int {
    kWords = max_of(scale_words(scale_count(tensor), scale_type(tensor)), 1),
    kPiece = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1,
  };
  u32 words_[kWords];
};
template <int tensor>
__device__ __forceinline__ void clear_scale(u32 scales, int key, int group) {
  const u32 at = scale_place<tensor>(scales, key, group);
  if constexpr (scale_type(tensor) == kF32)
    store_shared(at, 0);
  else
    store_shared_u16(at, 0);
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
    find_scales();
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

  // Starts the loads of this lane's part of the tile. Of rows of blocks `scales` takes where they begin.
  template <bool whole>
  __device__ __forceinline__ void copy_keys(u32 to, u32 scales = 0) const {
    if constexpr (is_block(StoredK::kType))
      copy_blocks<StoredK, kHeadDim, kOfK, whole>(p_.k, to, scales);
    else
      copy_rows<StoredK, kHeadDim, whole>(p_.k, p_.d, to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to, u32 scales = 0) const {
    if constexpr (is_block(StoredV::kType))
      copy_blocks<StoredV, kValueDim, kOfV, whole>(p_.v, to, scales);
    else
      copy_rows<StoredV, kValueDim, whole>(p_.v, p_.dv, to);
  }

  // Rows of blocks, as they were copied to `rows`, become panels of codes in their place, and scales. `sync` is a
  // barrier of the warp group, which has to meet at another one before it reads them.
  template <class Sync>
  __device__ __forceinline__ void separate_keys(u32 rows, u32 scales, Sync sync) const {
    if constexpr (is_block(StoredK::kType)) separate<StoredK, kHeadDim, kKRowBytes, kOfK>(rows, scales, sync);
  }
  template <class Sync>
  __device__ __forceinline__ void separate_values(u32 rows, u32 scales, Sync sync) const {
    if constexpr (is_block(StoredV::kType)) separate<StoredV, kValueDim, kVRowBytes, kOfV>(rows, scales, sync);
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
      const u32 entry = there && kPage > 0 ? scale_ids_[i] : 0;
      const u32 row = !there ? 0 : kPage > 0 ? (s.n.k_start + key) % max_of(kPage, 1) : s.n.k_start + key;
      const KeyInMemory from = {scale_key(i), there, entry, row};
      halves |= (copy_scales_of<kOfK>(p_.k_scale, from, to) | copy_scales_of<kOfV>(p_.v_scale, from, to) |
                 copy_scales_of<kZeroOfK>(p_.k_zero_point, from, to) |
                 copy_scales_of<kZeroOfV>(p_.v_zero_point, from, to))
                << 4 * i;
    }
    return halves;
  }
  // Those of f16 that are the upper half of their word go to the lower one, once the copies of this lane are there.
  __device__ __forceinline__ void take_lower_halves(u32 halves, u32 scales) const {
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i, halves >>= 4) {
      if (scale_key(i) < 0) continue;
      lower_half_of<kOfK>(halves, scales, scale_key(i));
      lower_half_of<kOfV>(halves, scales, scale_key(i));
      lower_half_of<kZeroOfK>(halves, scales, scale_key(i));
      lower_half_of<kZeroOfV>(halves, scales, scale_key(i));
    }
  }

  // Goes to the next tile.
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (more()) fetch_ids();
    if (kScalesOfKey > 0 && tiles_.begins_work_tile()) find_scales();
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
  // Where memory has a key of a tile: in a page, with pages, and in which row.
  struct KeyInMemory {
    int key;
    bool there;
    u32 entry, row;
  };

  // Where scales of the sequence and kv head begin.
  __device__ __forceinline__ const unsigned char* scales_of_head(const CodeScales& t) const {
    const WorkTile& tile = tiles_.work_tile();
    const int entry = !t.of_rows ? tile.batch : kPage > 0 || kPackedK ? 0 : tile.sequence.entry;
    return static_cast<const unsigned char*>(t.data) + entry * t.batch + tile.head * t.head;
  }
  __device__ __forceinline__ void find_scales() {
    if (scale_count(kOfK) > 0) scales_[kOfK] = scales_of_head(p_.k_scale);
    if (scale_count(kOfV) > 0) scales_[kOfV] = scales_of_head(p_.v_scale);
    if (scale_count(kZeroOfK) > 0) scales_[kZeroOfK] = scales_of_head(p_.k_zero_point);
    if (scale_count(kZeroOfV) > 0) scales_[kZeroOfV] = scales_of_head(p_.v_zero_point);
  }

  // Numbers side by side come as they are, and so does each of f32. One of f16 comes in the word of 4 bytes that it is
  // a half of; returns the bit of the tensor where that is the upper one. Other numbers of f16 are waited for.
  template <int tensor>
  __device__ __forceinline__ u32 copy_scales_of(const CodeScales& t, const KeyInMemory& from, u32 to) const {
    constexpr int kCount = scale_count(tensor), kBytes = bytes_of(scale_type(tensor));
    if (kCount == 0 || scales_in_rows(tensor)) return 0;
    const unsigned char* at = scales_[tensor] + from.row * static_cast<unsigned long long>(t.row);
    if (kPage > 0 && t.of_rows) at += from.entry * static_cast<unsigned long long>(t.batch);
    const u32 place = scale_place<tensor>(to, from.key, 0);
    if (t.runs) {
      constexpr int kPiece = max_of(scale_piece(kBytes * kCount), 4);
#pragma unroll
      for (int i = 0; i < kBytes * kCount / kPiece; ++i)
        async_copy_piece<kPiece>(place + kPiece * i, at + kPiece * i, from.there);
      return 0;
    }
    if (kBytes == 2 && (kCount > 1 || !t.of_rows)) {
#pragma unroll
      for (int group = 0; group < kCount; ++group, at += t.group)
        store_shared_u16(place + 2 * group, from.there ? *reinterpret_cast<const unsigned short*>(at) : 0);
      return 0;
    }
    const u32 upper = u32(reinterpret_cast<unsigned long long>(at)) >> 1 & 1;
#pragma unroll
    for (int group = 0; group < kCount; ++group, at += t.group)
      async_copy4(place + 4 * group, at - 2 * upper, !from.there ? 0 : upper ? 4 : kBytes);
    return kBytes == 2 ? upper << tensor : 0;
  }

  template <int tensor>
  __device__ __forceinline__ void lower_half_of(u32 halves, u32 scales, int key) const {
    if (scale_count(tensor) != 1 || scales_in_rows(tensor) || scale_type(tensor) == kF32) return;
    const u32 place = scale_place<tensor>(scales, key, 0);
    if (halves >> tensor & 1) store_shared(place, load_shared(place) >> 16);
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

  // Rows of blocks, by as many lanes each as they may have chunks of 16 bytes.
  template <class Type, int columns, int tensor, bool whole>
  __device__ __forceinline__ void copy_blocks(const StridedTensor& t, u32 to, u32 scales) const {
    constexpr int kBytes = row_of_blocks(Type::kType, columns), kCopied = copied_row_of_blocks(Type::kType, columns);
    constexpr int kLanes = kCopied <= 64 ? 4 : kCopied <= 128 ? 8 : kCopied <= 256 ? 16 : 32;
    constexpr int kKeys = kBlockKeys / warps, kAtOnce = 32 / kLanes;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int lane = threadIdx.x % 32, first = row_ / (kRowsAtOnce * kRows) * kKeys, chunk = lane % kLanes;
    const long long entry = kPage > 0 || kPackedK ? 0 : s.entry;
    const int place = s.n.k_start + tiles_.tile() * kBlockKeys + first + lane / kLanes;
    const auto* const head =
        static_cast<const unsigned char*>(t.data) + tiles_.work_tile().head * t.head + entry * t.batch;
    const unsigned char* from = head + (kPage > 0 ? 0 : place * t.row);
#pragma unroll
    for (int i = 0; i < kKeys; i += kAtOnce) {
      const int key = first + i + lane / kLanes;
      bool there = whole || tiles_.tile() * kBlockKeys + key < s.n.sk;
      if (kPage > 0) {
        const u32 id = __shfl_sync(0xffffffff, scale_ids_[i / 32], (i + lane / kLanes) % 32);
        there = there && (whole || id < u32(p_.pages.entries));
        from = head + (there ? id * t.batch + (place + i) % max_of(kPage, 1) * t.row : 0);
      }
      const int start = u32(reinterpret_cast<unsigned long long>(from)) % 16;
      const int bytes = there ? min(max(start + kBytes - 16 * chunk, 0), 16) : 0;
      if (chunk < kCopied / 16)
        async_copy16(to + key * kCopied + 16 * chunk, from - start + (bytes > 0 ? 16 * chunk : 0), bytes);
      if (chunk == 0) store_shared(row_start_place<tensor>(scales, key), start);
      if (kPage == 0) from += kAtOnce * t.row;
    }
  }

  template <class Type, int columns, int panel_bytes, int tensor, class Sync>
  __device__ __forceinline__ void separate(u32 rows, u32 scales, Sync sync) const {
    constexpr int kBytes = row_of_blocks(Type::kType, columns), kCopied = copied_row_of_blocks(Type::kType, columns);
    constexpr int kBlocks = columns / kBlockColumns;
    constexpr int kChunks = bits_of(Type::kType) / 4, kOfPanel = panel_bytes / 16;  // of a block, of a row of a panel
    u32 x[kScaleKeys][kCopied / 4];
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      if (scale_key(i) < 0) continue;
      const u32 row = rows + scale_key(i) * kCopied;
      const u32 start = u32(load_shared(row_start_place<tensor>(scales, scale_key(i))));
#pragma unroll
      for (int j = 0; j < kCopied / 4; j += 4) load_shared16(row + 4 * j, x[i] + j);
      // To where they begin: by one word, by two, by half a word.
      u32 (&word)[kCopied / 4] = x[i];
#pragma unroll
      for (int j = 0; j + 1 < kCopied / 4; ++j) word[j] = start & 4 ? word[j + 1] : word[j];
#pragma unroll
      for (int j = 0; j + 2 < kCopied / 4; ++j) word[j] = start & 8 ? word[j + 2] : word[j];
#pragma unroll
      for (int j = 0; j + 1 < kCopied / 4; ++j) {
        word[j] = __byte_perm(word[j], word[j + 1], start & 2 ? 0x5432 : 0x3210);
      }
    }
    sync();
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      if (scale_key(i) < 0) continue;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
          const int chunk = block * kChunks + j;
          u32 codes[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const u32* const word = x[i] + kBytes / kBlocks * block / 4 + 4 * j + k;
            codes[k] = block % 2 == 0 ? __byte_perm(word[0], word[1], 0x5432) : word[1];
          }
          store_shared16(rows + chunk / kOfPanel * (kBlockKeys * panel_bytes) +
                             chunk_place<panel_bytes>(scale_key(i), chunk % kOfPanel),
                         codes);
        }
        // An even block begins with a word, an odd one in the middle of one.
        const u32 scale = x[i][kBytes / kBlocks * block / 4] >> (block % 2 == 0 ? 0 : 16);
        store_shared_u16(scale_place<tensor>(scales, scale_key(i), block), scale);
      }
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
  const unsigned char* scales_[kScaleTensors];
};
