// Loads of codes: rows of blocks by the lanes of a warp, in pieces of 16, 8 or 4 bytes, and boxes of rows by TMA.
#pragma once
#include "decode/codes/scale_loader.cuh"
#include "sm90/ptx/tma.cuh"

class CodeLoader : public ScaleLoader {
 public:
  using ScaleLoader::ScaleLoader;

  // Requests K and V of the tile, by a lane for each box of keys. TMA writes zeros for what no tensor has.
  __device__ __forceinline__ void copy_boxes(u32 k, u32 v, u32 full) const {
    const BoxStart at = box_of_lane();
    const int lane = threadIdx.x % 32;
    if (row_ / kRowsOfLoader != 0 || lane >= kBoxes) return;  // one warp requests them
    if (lane == 0) mbarrier_arrive_expect(full, kLayout.k_bytes + kLayout.v_bytes);
    copy_box<kOfK>(p_.k_map, p_.k, at, k, full);
    copy_box<kOfV>(p_.v_map, p_.v, at, v, full);
  }
  // Requests K or V of this warp's keys of the tile.
  template <int tensor>
  __device__ __forceinline__ void copy_boxes_of_warp(u32 to, u32 full) const {
    const BoxStart at = box_of_lane();
    const int lane = threadIdx.x % 32, key = lane * kBoxKeys - first_key();
    if (key < 0 || key >= kKeysOfLoader) return;
    using Rows = BlockRows<tensor>;
    if (key == 0) mbarrier_arrive_expect(full, tile_bytes(Rows::kType, Rows::kColumns, kKeysOfLoader, Rows::kPiece, 1));
    copy_box<tensor>(tensor == kOfV ? p_.v_map : p_.k_map, tensor == kOfV ? p_.v : p_.k, at, to, full);
  }

  // Requests K or V of all heads of a CTA (kHeads), and copies their scales by all lanes of the warp. If there are
  // scales, every lane arrives at `full` once its own are there.
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

  // How many of this warp's keys of the tile come after the end of the sequence.
  __device__ __forceinline__ u32 keys_after_end() const {
    const int there = tiles_.work_tile().sequence.n.sk - tiles_.tile() * kBlockKeys - first_key();
    return max(kKeysOfLoader - max(there, 0), 0);
  }
  // How far after a multiple of 16 bytes the rows of the tile begin.
  template <int tensor>
  __device__ __forceinline__ u32 begin_of_row() const {
    return BlockRows<tensor>::begin(p_, tiles_.work_tile());
  }

  // Moves rows of blocks that began in the middle of a word to where other rows begin. The tile has arrived, and the
  // warp group meets at a barrier before it reads them.
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

 protected:
  // Copies the pieces of the rows of a warp from piece `first` on. If a row has few pieces, as many lanes copy it
  // together, so that its bytes are requested at once. Else 2^n lanes do, and a second pass copies the pieces that are
  // left.
  template <int tensor, bool whole, int first = 0>
  __device__ __forceinline__ void copy_blocks(const StridedTensor& t, u32 to) const {
    using Rows = BlockRows<tensor>;
    constexpr int kLeft = Rows::kPieces - first;
    constexpr int kFewLanes = kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : kLeft >= 2 ? 2 : 1;
    constexpr int kLanes = kLeft >= 32 ? 32 : kLeft >= 16 ? 16 : Rows::kPiece == kMiddle ? kLeft : kFewLanes;
    constexpr int kKeys = kKeysOfLoader, kKeysAtOnce = 32 / kLanes;
    // Successive keys that are in one page for certain.
    constexpr int kRunKeys = kPage == 0 ? kKeys : kPage % 16 == 0 && !kLeftPad ? 16 : 1;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int lane = threadIdx.x % 32, key_of_lane = lane / kLanes, begin = row_ / kRowsOfLoader * kKeys;
    const int piece = first + lane % kLanes;
    const long long entry = kPage > 0 || kPackedK ? 0 : s.entry;
    const int place = s.n.k_start + tiles_.tile() * kBlockKeys + begin + key_of_lane;
    const int begins = Rows::begin(p_, tiles_.work_tile());
    const auto* const head = static_cast<const unsigned char*>(t.data) + tiles_.work_tile().head * t.head - begins +
                             entry * t.batch + Rows::kCopied * piece;
    // The last piece of a row that begins in the middle of 16 bytes is shorter.
    const int bytes_of_piece = Rows::kPiece == kMiddle
                                   ? min(begins + Rows::kBytes - Rows::kCopied * piece, int(Rows::kCopied))
                                   : int(Rows::kCopied);
    const bool has_row = key_of_lane < kKeysAtOnce;
    const unsigned char* from = head + (kPage > 0 ? 0 : place * t.row);
    const u32 to_piece = to + (begin + key_of_lane) * Rows::kStride + Rows::kCopied * piece;
    bool in_page = true;
#pragma unroll
    for (int i = 0; i < kKeys; i += kKeysAtOnce) {
      if (kPage > 0 && (i % kRunKeys == 0 || kRunKeys % kKeysAtOnce != 0)) {
        const u32 id = __shfl_sync(0xffffffff, scale_ids_[i / 32], (i + key_of_lane) % 32);
        in_page = whole || id < u32(p_.pages.entries);
        from = head + (in_page ? id * t.batch + (place + i) % max_of(kPage, 1) * t.row : 0);
      }
      const bool there = whole || (in_page && tiles_.tile() * kBlockKeys + begin + i + key_of_lane < s.n.sk);
      if (has_row && (i + kKeysAtOnce <= kKeys || i + key_of_lane < kKeys)) {
        const u32 place_of_piece = to_piece + i * Rows::kStride;
        if constexpr (Rows::kPiece == 2) {
          // Rows that may begin in the middle of a word are copied by whole words. The last word of a row says where it
          // begins, for align_rows.
          const int start = u32(reinterpret_cast<unsigned long long>(from)) % 4;
          const int bytes = there ? min(max(start + Rows::kBytes - 4 * piece, 0), 4) : 0;
          async_copy_part<4>(place_of_piece, bytes > 0 ? static_cast<const void*>(from - start) : t.data, bytes);
          if (piece == 0) store_shared(place_of_piece + Rows::kStride - 4, start);
        } else {
          async_copy_part<Rows::kCopied>(place_of_piece, whole || there ? from : head, there ? bytes_of_piece : 0);
        }
      }
      from += kKeysAtOnce * t.row;
    }
    if constexpr (kLanes < kLeft) copy_blocks<tensor, whole, first + kLanes>(t, to);
  }

 private:
  // Where this lane's box begins in K and V.
  __device__ __forceinline__ BoxStart box_of_lane() const {
    const WorkTile& tile = tiles_.work_tile();
    const int row = tile.sequence.n.k_start + tiles_.tile() * kBlockKeys + key_of_box();
    const BoxStart at = {0, kPage > 0 ? row % max_of(kPage, 1) : row, tile.head,
                         kPage > 0 ? id_of_box() : kPackedK ? 0 : tile.sequence.entry};
    if (kBoxes == 1) return {0, uniform(at.row), uniform(at.head), uniform(at.batch)};
    return at;
  }
  static __device__ __forceinline__ int key_of_box() { return kBoxes == 1 ? 0 : threadIdx.x % 32 * kBoxKeys; }

  // Requests this lane's box of K or V of the tile at `to`.
  template <int tensor>
  static __device__ __forceinline__ void copy_box(const TensorMapBlob& map, const StridedTensor& t, BoxStart at, u32 to,
                                                  u32 full) {
    using Rows = BlockRows<tensor>;
    const int key = key_of_box();
    using Stored = ElementType<Rows::kType>;
    if constexpr (is_block(Rows::kType)) {
      // The columns of the map are pairs of bytes, with kMiddle those of all heads. Boxes begin at multiples of 16
      // bytes.
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
};
