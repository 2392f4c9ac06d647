// Loads of scales and zero points of codes, which do not lie in blocks: lanes copy those of their keys by cp.async, in
// the type that memory has.
#pragma once
#include "device/cp_async.cuh"
#include "decode/codes/scales.cuh"
#include "decode/loads/lane_keys.cuh"

class ScaleLoader : public LaneKeys {
 public:
  enum : int { kHalfBits = 4 * kScaleKeys };  // that copy_scales returns

  __device__ __forceinline__ ScaleLoader(const DecodeParams& p, const TileWalk& tiles, int warp)
      : LaneKeys(p, tiles, warp) {
    find_scales();
  }
  __device__ __forceinline__ void next() {
    LaneKeys::next();
    if (kScalesOfKey > 0 && tiles_.begins_work_tile()) find_scales();
  }

  // The first key of a tile that this warp loads.
  __device__ __forceinline__ int first_key() const { return row_ / kRowsOfLoader * kKeysOfLoader; }

  // Starts the copies of the scales of this lane's keys of the tile, of K, of V or of both, zeros where keys do not
  // exist. A scale of f16 comes with the word of 4 bytes that has it. Returns a bit for each key and tensor whose scale
  // is the upper half.
  template <bool of_k = true, bool of_v = true>
  __device__ __forceinline__ u32 copy_scales(u32 to) const {
    const DecodeSequence& s = tiles_.work_tile().sequence;
    u32 halves = 0;
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      const int page = kPage == 0 ? 0 : id_of_scales(i);
      if (scale_key(i) < 0) continue;
      const int key = tiles_.tile() * kBlockKeys + scale_key(i);
      const bool there = key < s.n.sk && (kPage == 0 || u32(page) < u32(p_.pages.entries));
      const u32 entry = there && kPage > 0 ? page : 0;
      const u32 row = !there ? 0 : kPage > 0 ? (s.n.k_start + key) % max_of(kPage, 1) : s.n.k_start + key;
      const KeyInMemory from = {scale_key(i), there, entry, row};
      u32 of_key = 0;
      if constexpr (of_k)
        of_key |= copy_scales_of<kOfK>(p_.k_scale, from, to) | copy_scales_of<kZeroOfK>(p_.k_zero_point, from, to);
      if constexpr (of_v)
        of_key |= copy_scales_of<kOfV>(p_.v_scale, from, to) | copy_scales_of<kZeroOfV>(p_.v_zero_point, from, to);
      halves |= of_key << 4 * i;
    }
    return halves;
  }

  // Moves scales of f16 from the upper halves of their words to the lower ones. The copies of this lane have arrived.
  __device__ __forceinline__ void take_lower_halves(u32 halves, u32 scales) const {
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i, halves >>= 4) {
      if (scale_key(i) < 0) continue;
      take_lower_half<kOfK>(halves, scales, scale_key(i));
      take_lower_half<kOfV>(halves, scales, scale_key(i));
      take_lower_half<kZeroOfK>(halves, scales, scale_key(i));
      take_lower_half<kZeroOfV>(halves, scales, scale_key(i));
    }
  }

  // Copies the scales of all heads of a CTA (kHeads) by pieces of 16 bytes, zeros where keys do not exist. Where the
  // pieces are not aligned in memory, the lanes store the scales themselves; then the result is false.
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

 private:
  // A key of the tile, and where memory has it: its page, or its entry of the batch, and its row there.
  struct KeyInMemory {
    int key;
    bool there;
    u32 entry, row;
  };

  // Where the scales of the sequence and kv head begin, in each tensor.
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

  // Copies the scales of one key in one tensor. Those that lie side by side come by pieces of up to 16 bytes, and so
  // does each of f32. A single one of f16 comes with its word; the result has the tensor's bit where it is the upper
  // half. Several of f16 that lie apart are loaded and stored at once.
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
  __device__ __forceinline__ void take_lower_half(u32 halves, u32 scales, int key) const {
    if (scale_count(tensor) != 1 || scales_in_rows(tensor) || scale_type(tensor) == kF32) return;
    const u32 place = scale_place<tensor>(scales, key, 0);
    if (halves >> tensor & 1) store_shared(place, load_shared(place) >> 16);
  }

  const unsigned char* scales_[kScaleTensors];
};
