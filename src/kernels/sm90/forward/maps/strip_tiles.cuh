// Where a map says which key tiles are visible (kMapsTiles), the producer warp walks over the tiles of a q tile that
// some of its strips see.
#pragma once
#include "sm90/forward/maps/block_order.cuh"

// The walk, from right to left. Lane i looks at the strip of warpgroup i % kConsumers, of whose words it reads the one
// that is i / kConsumers after the current one.
class StripTiles {
 public:
  int tile = -1;  // the current one; -1 at the end

  __device__ __forceinline__ StripTiles() {}
  // `row`: the first of the lane's strip; n.sq if there is none.
  template <class Params>
  __device__ __forceinline__ StripTiles(const Params& p, const QTile& q_tile, const Lengths& n,
                                        const KeyTiles& keys, int row)
      : first_(keys.begin), last_(keys.end - 1) {
    const SeenWords& map = p.expression.map;
    const bool exists = kMapStrips > 1 || row < n.sq;
    const u64* const words = words_of_block(map, q_tile.batch, q_tile.head,
                                            !exists ? 0 : kMapStrips > 1 ? q_tile.block : row / kStripRows);
    if (map.has_spans()) {
      const u64 span = words[-1];
      first_ = max(first_, __reduce_min_sync(0xffffffff, exists ? int(u32(span)) : last_));
      last_ = min(last_, int(__reduce_max_sync(0xffffffff, exists ? int(span >> 32) : 0)) - 1);
    }
    words_ = exists ? int(words - map.words) : -1;
    // The map says nothing of the bounds of the call, nor of the end of the keys inside a tile.
    all_see_ = keys_seen_by_all(band_of(p), n, row, min(row + kStripRows, n.sq) - 1);
    word_ = last_ >= 0 ? last_ / 32 : -1;
    if (last_ >= first_) find_word(map);
    take();
  }
  __device__ __forceinline__ bool more() const { return tile >= 0; }
  __device__ __forceinline__ void next(const SeenWords& map) {
    if (any_ == 0) {
      --word_;
      find_word(map);
    }
    take();
  }
  // Whether the mask hides keys of the tile from some strip.
  __device__ __forceinline__ bool mask_hides() const {
    return __any_sync(0xffffffff, more() && (packed_masked_by(packed()) & kMaskedByMask) != 0);
  }
  // The tile and what masks it for the lane's strip, packed; -1 at the end.
  __device__ __forceinline__ int packed() const {
    if (!more()) return -1;
    const int bit = tile % 32;
    int masked_by = partial_ >> bit & 1 ? +kMaskedByMask : 0;
    if (is_masked_by_bounds())
      masked_by |= !kMaskBits || kBoundsApart ? +kMaskedByBounds : +kMaskedByMask;
    if ((seen_ >> bit & 1) == 0) masked_by = kSkipsTiles ? +kUnseen : +kMaskedByMask;
    return pack_tile(tile, masked_by);
  }
  // What consumers hear of the tile, and of those after it that are masked alike, for the lane's strip.
  __device__ __forceinline__ NextTile published() const {
    if (!more()) return kNoTile;
    if (is_masked_by_bounds()) return {packed(), tile};
    // In the same word, and none that the bounds cut.
    const int bit = tile % 32;
    const u32 alike = seen_ & (partial_ >> bit & 1 ? partial_ : ~partial_);
    const int last = tile - __clz(int(~(alike << (31 - bit)))) + 1;
    return {packed(), max(last, (all_see_.begin + kBlockKeys - 1) / kBlockKeys)};
  }

 private:
  enum : int { kWords = 32 / kConsumers };  // that a warp reads at a time

  // Whether the bounds of the call hide keys of the tile from some row of the strip.
  __device__ __forceinline__ bool is_masked_by_bounds() const {
    return is_partial(all_see_, tile * kBlockKeys, (tile + 1) * kBlockKeys);
  }
  // Finds the next word from word_ on that has seen tiles.
  __device__ __forceinline__ void find_word(const SeenWords& map) {
    const int lane = threadIdx.x % 32, ahead = lane / kConsumers;
    for (; word_ >= first_ / 32; word_ -= kWords) {
      const int mine = word_ - ahead;
      u64 word = words_ >= 0 && ahead < kWords && mine >= first_ / 32 ? map.words[words_ + mine] : 0;
      if (mine == first_ / 32) word &= ~0ull << first_ % 32;
      if (mine == last_ / 32) word &= ~(~1ull << last_ % 32) | ~0ull << 32;
      const u32 found = __ballot_sync(0xffffffff, u32(word) != 0);
      if (found == 0) continue;
      const int from = (__ffs(int(found)) - 1) / kConsumers;
      seen_ = __shfl_sync(0xffffffff, u32(word), from * kConsumers + lane % kConsumers);
      partial_ = __shfl_sync(0xffffffff, u32(word >> 32), from * kConsumers + lane % kConsumers);
      any_ = __reduce_or_sync(0xffffffff, seen_);
      word_ -= from;
      return;
    }
  }
  __device__ __forceinline__ void take() {
    const int bit = 31 - __clz(int(any_));  // -1: no tile is left
    tile = any_ == 0 ? -1 : 32 * word_ + bit;
    any_ &= ~(1u << (bit & 31));
  }

  int words_;  // where those of the strip begin in the map; -1: there is no strip
  int first_, last_;
  KeyRange all_see_;  // the keys that all rows of the strip see by the bounds of the call
  int word_;
  u32 any_ = 0;  // of word_: tiles that some strip sees and that are left
  u32 seen_ = 0, partial_ = 0;  // of word_: tiles of the lane's strip
};

// The number of the CTA's next q tile, from the counter of the launch.
template <class Params>
__device__ __forceinline__ int take_number(const Params& p) {
  const int next = threadIdx.x % 32 == 0 ? int(gridDim.x) + atomicAdd(&p.counters[0], 1) : 0;
  return __shfl_sync(0xffffffff, next, 0);
}

// A q tile, and the tiles that its strips see.
struct MappedTile {
  QTile tile;
  Lengths n;
  StripTiles seen;

  template <class Params>
  __device__ __forceinline__ void go_to(const Params& p, const QTile& to) {
    tile = to;
    n = lengths_of(p, tile.batch);
    strips_ = strips_of_mapped_block(p, n.sq, tile.block);
    if (!has_rows()) return;
    // Warpgroups take turns at the bottom, as without a map (sm90/forward/producer.cuh).
    flip_ = !(kSplitTail && tile.split >= 0) && !flip_;
    const KeyTiles keys = key_tiles_of(p.work, band_of(p), n, strips_, kBlockKeys, kSplitTail, tile);
    wait_for_earlier_kernels();  // which make the map
    seen = StripTiles(p, tile, n, keys, strip_of(threadIdx.x % 32 % kConsumers).row);
  }
  __device__ __forceinline__ bool has_rows() const { return tile.block >= 0 && kStripRows * strips_.first < n.sq; }

  // The strip of a warpgroup; row n.sq: it has none.
  __device__ __forceinline__ Strip strip_of(int group) const {
    const int mine = strips_.first + (flip_ ? kConsumers - 1 - group : group);
    return {mine < strips_.end ? kStripRows * mine : n.sq, tile.head};
  }

 private:
  BlockStrips strips_;
  bool flip_ = false;
};
