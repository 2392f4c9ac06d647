// Loads of K and V by cp.async: the lanes of a warp copy rows of any strides and of any pages.
#pragma once
#include "device/cp_async.cuh"
#include "decode/query.cuh"
#include "decode/tile_walk.cuh"
#include "sm90/ptx/tma.cuh"

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

// What the heads of a CTA have of K or V of a key, side by side (kHeads).
template <int tensor>
struct RowsOfHeads {
  static constexpr Element kType = tensor % 2 == 0 ? StoredK::kType : StoredV::kType;
  enum : int {
    kBytes = code_row_bytes(kType, tensor % 2 == 0 ? kHeadDim : kValueDim),  // of a head
    kPitch = pitch_of_heads(kHeads * kBytes),
  };
  // The 16 bytes in which the row of this warp's head begins.
  static __device__ __forceinline__ u32 place() { return kHeads == 1 ? 0 : head_of_warp() * kBytes / 16 * 16; }
};

// K or V of a tile where they are blocks.
template <int tensor>
struct BlockRows {
  static constexpr Element kType = tensor % 2 == 0 ? StoredK::kType : StoredV::kType;
  enum : int {
    kColumns = tensor % 2 == 0 ? kHeadDim : kValueDim,
    kPiece = tensor % 2 == 0 ? kKPiece : kVPiece,
    kBytes = row_of_blocks(kType, kColumns),
    kStride = kHeads > 1 ? int(RowsOfHeads<tensor>::kPitch) : shared_row_of_blocks(kType, kColumns, kPiece),
    // Of one that may begin in the middle of a word, all words that it may have.
    kCopied = kPiece == kMiddle ? 16 : max_of(kPiece, 4),
    kPieces = (kBytes + (kPiece == 2 ? 2 : 0) + kCopied - 1) / kCopied,
  };
  // How many bytes after a multiple of 16 they begin, in memory and in shared memory; of a head of kHeads.
  static __device__ __forceinline__ u32 begin(const DecodeParams& p, const WorkTile& tile, int head = head_of_warp()) {
    if (kHeads > 1) return kPiece == kMiddle ? u32(head * kBytes) % 16 : 0;
    return kPiece == kMiddle ? u32(tile.head * (tensor % 2 == 0 ? p.k : p.v).head) % 16 : 0;
  }
};

// Where numbers of a key lie, side by side; those of blocks with the codes of the tile, of which `scales` says where
// they are.
template <int tensor>
__device__ __forceinline__ u32 scale_place(u32 scales, int key, int group) {
  if constexpr (scales_in_rows(tensor))
    return scales + key * BlockRows<tensor>::kStride + group * block_bytes(BlockRows<tensor>::kType);
  if constexpr (kHeads > 1)
    return scales + scale_pitches_before(tensor) * kBlockKeys + key * scale_pitch(tensor) +
           head_of_warp() * scale_bytes(tensor) + group * bytes_of(scale_type(tensor));
  constexpr int kWords = scale_words(scale_count(tensor), scale_type(tensor));
  return scales + 4 * (scale_words_before(tensor) * kBlockKeys + key * kWords) + group * bytes_of(scale_type(tensor));
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
    if constexpr (scales_in_rows(tensor)) {
      words_[0] = at;
    } else if constexpr (kHeads > 1 && scale_bytes(tensor) % 4 != 0) {
      words_[0] = load_shared_u16(at);
    } else {
#pragma unroll
    for (int i = 0; i < kWords / kPiece; ++i)
      load_shared_words<kPiece>(at + 4 * kPiece * i, words_ + kPiece * i);
    }
  }
  __device__ __forceinline__ float operator[](int group) const {
    if constexpr (scales_in_rows(tensor))
      return load_scale<tensor>(words_[0], 0, group);
    else if constexpr (scale_type(tensor) == kF32)
      return __uint_as_float(words_[group]);
    else
      return group % 2 == 0 ? Half::low(words_[group / 2]) : Half::high(words_[group / 2]);
  }

 private:
  enum : int {
    kWords = scales_in_rows(tensor) ? 1 : max_of(scale_words(scale_count(tensor), scale_type(tensor)), 1),
    kPiece = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1,
  };
  u32 words_[kWords];  // of blocks where the first one lies
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

  // Starts the loads of this lane's part of the tile.
  template <bool whole>
  __device__ __forceinline__ void copy_keys(u32 to) const {
    if constexpr (is_block(StoredK::kType))
      copy_blocks<kOfK, whole>(p_.k, to);
    else
      copy_rows<StoredK, kHeadDim, whole>(p_.k, p_.d, to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to) const {
    if constexpr (is_block(StoredV::kType))
      copy_blocks<kOfV, whole>(p_.v, to);
    else
      copy_rows<StoredV, kValueDim, whole>(p_.v, p_.dv, to);
  }

  // Rows of blocks that began in the middle of a word go to where others begin, once all of the tile is there. The warp
  // group has to meet at a barrier before it reads them.
  template <int tensor>
  __device__ __forceinline__ void align_rows(u32 rows) const {
    using Rows = BlockRows<tensor>;
    if constexpr (Rows::kPiece != 2) return;
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      if (scale_key(i) < 0) continue;
      const u32 row = rows + scale_key(i) * Rows::kStride;
      if (load_shared(row + Rows::kStride - 4) == 0) continue;
      u32 word = load_shared(row);
#pragma unroll 4
      for (int j = 1; j < Rows::kPieces; ++j) {
        const u32 next = load_shared(row + 4 * j);
        store_shared(row + 4 * j - 4, int(__byte_perm(word, next, 0x5432)));
        word = next;
      }
      store_shared(row + 4 * Rows::kPieces - 4, int(word >> 16));
    }
  }

  // Asks TMA for K and V of the tile, a lane for each box of keys. Of what no tensor has, it writes zeros.
  __device__ __forceinline__ void copy_boxes(u32 k, u32 v, u32 full) const {
    const WorkTile& tile = tiles_.work_tile();
    const int lane = threadIdx.x % 32, key = kBoxes == 1 ? 0 : lane * kBoxKeys;
    const int row = tile.sequence.n.k_start + tiles_.tile() * kBlockKeys + key;
    BoxStart at = {0, kPage > 0 ? row % max_of(kPage, 1) : row, tile.head,
                   kPage > 0 ? ids_[0] : kPackedK ? 0 : tile.sequence.entry};
    if (kBoxes == 1) at = {0, uniform(at.row), uniform(at.head), uniform(at.batch)};
    if (row_ / (kRowsAtOnce * kRows) != 0 || lane >= kBoxes) return;
    if (lane == 0) mbarrier_arrive_expect(full, kLayout.k_bytes + kLayout.v_bytes);
    copy_box<kOfK>(p_.k_map, p_.k, at, key, k, full);
    copy_box<kOfV>(p_.v_map, p_.v, at, key, v, full);
  }

  // The same of K or of V of the heads of a CTA, and their scales, by all lanes of a warp, which arrive at `full` once
  // these are there.
  template <int tensor>
  __device__ __forceinline__ void copy_heads(const TensorMapBlob& map, u32 to, u32 scales, u32 full) const {
    const int lane = threadIdx.x % 32, key = kBoxes == 1 ? 0 : lane * kBoxKeys;
    const WorkTile& tile = tiles_.work_tile();
    const int row = tile.sequence.n.k_start + tiles_.tile() * kBlockKeys + key;
    const BoxStart at = {0, kPage > 0 ? row % max_of(kPage, 1) : row, tile.head,
                         kPage > 0 ? ids_[0] : kPackedK ? 0 : tile.sequence.entry};
    if (lane == 0) mbarrier_arrive_expect(full, RowsOfHeads<tensor>::kPitch * kBlockKeys);
    __syncwarp();
    if (lane < kBoxes) tma_load(to + key * RowsOfHeads<tensor>::kPitch, &map, full, at, Keep::kShort);
    if constexpr (scale_pitch(tensor) > 0) {
      const bool of_v = tensor == kOfV;
      const bool copied = copy_scales_of_heads<tensor>(of_v ? p_.v_scale : p_.k_scale, scales) &
                          copy_scales_of_heads<of_v ? kZeroOfV : kZeroOfK>(of_v ? p_.v_zero_point : p_.k_zero_point,
                                                                           scales);
      if (copied) return async_copy_arrive(full);
      async_copy_commit();
      async_copy_wait<0>();
      mbarrier_arrive(full);
    }
  }

  enum : int {
    kRows = kBlockKeys / (kRowsAtOnce * warps),  // that a lane copies of
    kBoxes = kBlockKeys / max_of(kBoxKeys, 1),
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
    if constexpr (kBoxKeys > 0) {
      const int of_box = tiles_.tile() * kBlockKeys + int(threadIdx.x % 32) * kBoxKeys;
      ids_[0] = of_box < s.n.sk ? page_id(p_, ids, (s.n.k_start + of_box) / max_of(kPage, 1)) : -1;
    }
#pragma unroll
    for (int i = 0; kBoxKeys == 0 && i < kRows; i += kRunRows)
      ids_[i / kRunRows] = key(i) < s.n.sk ? page_id(p_, ids, (s.n.k_start + key(i)) / max_of(kPage, 1)) : -1;
    if (kScalesOfKey == 0 || kHeads > 1) return;
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      const int of_scales = tiles_.tile() * kBlockKeys + max(scale_key(i), 0);
      scale_ids_[i] = of_scales < s.n.sk ? page_id(p_, ids, (s.n.k_start + of_scales) / max_of(kPage, 1)) : -1;
    }
  }

  // The box of keys that begins with the `key`-th of a tile at `to`.
  template <int tensor>
  static __device__ __forceinline__ void copy_box(const TensorMapBlob& map, const StridedTensor& t, BoxStart at,
                                                  int key, u32 to, u32 full) {
    using Rows = BlockRows<tensor>;
    using Stored = ElementType<Rows::kType>;
    if constexpr (is_block(Rows::kType)) {
      // Columns are pairs of bytes, perhaps of all heads; TMA begins at multiples of 16 bytes.
      if (Rows::kPiece == kMiddle) at = {at.head * int(t.head) / 16 * 8, at.row, 0, at.batch};
      tma_load(to + key * Rows::kStride, &map, full, at, Keep::kShort);
    } else {
      constexpr int kRowBytes = panel_row_bytes(Rows::kType, Rows::kColumns);
#pragma unroll
      for (int panel = 0; panel < panels_of(Rows::kType, Rows::kColumns); ++panel) {
        at.dim = panel * int(kPanelRowBytes / sizeof(typename Stored::Memory));
        tma_load(to + (panel * kBlockKeys + key) * kRowBytes, &map, full, at, Keep::kShort);
      }
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
    return static_cast<const unsigned char*>(t.data) + entry * t.batch + tile.head * kHeads * t.head;
  }
  __device__ __forceinline__ void find_scales() {
    if (scale_count(kOfK) > 0) scales_[kOfK] = scales_of_head(p_.k_scale);
    if (scale_count(kOfV) > 0) scales_[kOfV] = scales_of_head(p_.v_scale);
    if (scale_count(kZeroOfK) > 0) scales_[kZeroOfK] = scales_of_head(p_.k_zero_point);
    if (scale_count(kZeroOfV) > 0) scales_[kZeroOfV] = scales_of_head(p_.v_zero_point);
  }

  // Scales of the heads of a CTA, zeros where keys are not there, by pieces of 16 bytes. False where they lie at no
  // multiples of these and are stored.
  template <int tensor>
  __device__ __forceinline__ bool copy_scales_of_heads(const CodeScales& t, u32 to) const {
    constexpr int kBytes = kHeads * scale_bytes(tensor), kPieces = max_of(kBytes / 16, 1);
    if constexpr (kBytes == 0) return true;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int lane = threadIdx.x % 32, first = tiles_.tile() * kBlockKeys;
#pragma unroll
    for (int i = 0; i < kBlockKeys * kPieces; i += 32) {
      const int key = (i + lane) / kPieces, piece = (i + lane) % kPieces;
      u32 entry = 0, row = s.n.k_start + first + key;
      if (kPage > 0) {
        entry = __shfl_sync(0xffffffff, ids_[0], key / max_of(kBoxKeys, 1));
        row %= max_of(kPage, 1);
      }
      const bool there = first + key < s.n.sk && (kPage == 0 || entry < u32(p_.pages.entries));
      const unsigned char* from = static_cast<const unsigned char*>(t.data);
      if (there)
        from = scales_[tensor] + row * static_cast<unsigned long long>(t.row) +
               entry * static_cast<unsigned long long>(t.batch) + 16 * piece;
      const u32 place = to + scale_pitches_before(tensor) * kBlockKeys + key * scale_pitch(tensor) + 16 * piece;
      if (t.runs) {
        async_copy16(place, from, there ? 16 : 0);
      } else {
#pragma unroll 1
        for (int j = 0; j < 16; j += 2)
          store_shared_u16(place + j, there ? *reinterpret_cast<const unsigned short*>(from + j) : 0);
      }
    }
    return t.runs;
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

  // Pieces of rows of blocks from piece `first` on. As many lanes as a row has pieces share it, where these are few, so
  // that it is asked for at once; or lanes that are a power of 2, and others take what is left.
  template <int tensor, bool whole, int first = 0>
  __device__ __forceinline__ void copy_blocks(const StridedTensor& t, u32 to) const {
    using Rows = BlockRows<tensor>;
    constexpr int kLeft = Rows::kPieces - first;
    constexpr int kFewLanes = kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : kLeft >= 2 ? 2 : 1;
    constexpr int kLanes = kLeft >= 32 ? 32 : kLeft >= 16 ? 16 : Rows::kPiece == kMiddle ? kLeft : kFewLanes;
    constexpr int kKeys = kBlockKeys / warps, kAtOnce = 32 / kLanes;
    // So many keys are in one page for certain.
    constexpr int kRun = kPage == 0 ? kKeys : kPage % 16 == 0 && !kLeftPad ? 16 : 1;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int lane = threadIdx.x % 32, of_lane = lane / kLanes, begin = row_ / (kRowsAtOnce * kRows) * kKeys;
    const int piece = first + lane % kLanes;
    const long long entry = kPage > 0 || kPackedK ? 0 : s.entry;
    const int place = s.n.k_start + tiles_.tile() * kBlockKeys + begin + of_lane;
    const int begins = Rows::begin(p_, tiles_.work_tile());
    const auto* const head = static_cast<const unsigned char*>(t.data) + tiles_.work_tile().head * t.head - begins +
                             entry * t.batch + Rows::kCopied * piece;
    // Of the last piece of a row that begins in the middle no more than it has.
    const int bytes_of_piece = Rows::kPiece == kMiddle
                                   ? min(begins + Rows::kBytes - Rows::kCopied * piece, int(Rows::kCopied))
                                   : int(Rows::kCopied);
    const bool has_row = of_lane < kAtOnce;
    const unsigned char* from = head + (kPage > 0 ? 0 : place * t.row);
    const u32 to_piece = to + (begin + of_lane) * Rows::kStride + Rows::kCopied * piece;
    bool in_page = true;
#pragma unroll
    for (int i = 0; i < kKeys; i += kAtOnce) {
      if (kPage > 0 && (i % kRun == 0 || kRun % kAtOnce != 0)) {
        const u32 id = __shfl_sync(0xffffffff, scale_ids_[i / 32], (i + of_lane) % 32);
        in_page = whole || id < u32(p_.pages.entries);
        from = head + (in_page ? id * t.batch + (place + i) % max_of(kPage, 1) * t.row : 0);
      }
      const bool there = whole || (in_page && tiles_.tile() * kBlockKeys + begin + i + of_lane < s.n.sk);
      if (has_row && (i + kAtOnce <= kKeys || i + of_lane < kKeys)) {
        const u32 place_of_piece = to_piece + i * Rows::kStride;
        if constexpr (Rows::kPiece == 2) {
          const int start = u32(reinterpret_cast<unsigned long long>(from)) % 4;
          const int bytes = there ? min(max(start + Rows::kBytes - 4 * piece, 0), 4) : 0;
          async_copy_part<4>(place_of_piece, bytes > 0 ? static_cast<const void*>(from - start) : t.data, bytes);
          if (piece == 0) store_shared(place_of_piece + Rows::kStride - 4, start);
        } else {
          async_copy_part<Rows::kCopied>(place_of_piece, whole || there ? from : head, there ? bytes_of_piece : 0);
        }
      }
      from += kAtOnce * t.row;
    }
    if constexpr (kLanes < kLeft) copy_blocks<tensor, whole, first + kLanes>(t, to);
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
