// Iterators over the tiles that a map shows (host_device/tile_map.h), for whole warps.
#pragma once
#include "device/schedule.cuh"

// The words of a block of a q head of a sequence.
__device__ __forceinline__ const u64* words_of_block(const SeenWords& map, int batch, int head, int block) {
  return map.words + batch * map.batch + head / map.heads_of_map * map.head + (long long)(block) * map.block +
         map.has_spans();
}

// Iterates over the seen tiles in [begin, end) of a block, in descending order with `down`, else in ascending order.
// Words: an array with a word for each 32 tiles.
template <class Words = const u64*>
class SeenTiles {
 public:
  int tile = -1;  // the current one; -1 at the end

  __device__ __forceinline__ SeenTiles(Words words, int begin, int end, bool down)
      : words_(words), first_(begin), last_(end - 1), down_(down) {
    if (begin >= end) return;
    word_ = down ? last_ / 32 : first_ / 32;
    find_word();
    take();
  }
  __device__ __forceinline__ bool more() const { return tile >= 0; }
  __device__ __forceinline__ bool is_partial() const { return partial_ >> tile % 32 & 1; }
  __device__ __forceinline__ bool next() {
    if (seen_ == 0) {
      word_ += down_ ? -1 : 1;
      find_word();
    }
    take();
    return more();
  }

 private:
  // Finds the next word from word_ on that has seen tiles; a warp reads 32 words at a time.
  __device__ __forceinline__ void find_word() {
    const int lane = threadIdx.x % 32;
    for (; down_ ? word_ >= first_ / 32 : word_ <= last_ / 32; word_ += down_ ? -32 : 32) {
      const int mine = down_ ? word_ - lane : word_ + lane;
      u64 word = mine >= first_ / 32 && mine <= last_ / 32 ? words_[mine] : 0;
      if (mine == first_ / 32) word &= ~0ull << first_ % 32;
      if (mine == last_ / 32) word &= ~(~1ull << last_ % 32) | ~0ull << 32;
      const u32 found = __ballot_sync(0xffffffff, u32(word) != 0);
      if (found == 0) continue;
      const int from = __ffs(int(found)) - 1;
      seen_ = __shfl_sync(0xffffffff, u32(word), from);
      partial_ = __shfl_sync(0xffffffff, u32(word >> 32), from);
      word_ += down_ ? -from : from;
      return;
    }
  }
  __device__ __forceinline__ void take() {
    const int bit = down_ ? 31 - __clz(int(seen_)) : __ffs(int(seen_)) - 1;  // -1: no tile is left
    tile = seen_ == 0 ? -1 : 32 * word_ + bit;
    seen_ &= ~(1u << (bit & 31));
  }

  Words words_;
  int first_, last_;
  bool down_;
  int word_ = 0;
  u32 seen_ = 0, partial_ = 0;  // of word_: seen tiles that are left, and partial tiles
};

// Iterates over the seen tiles in [begin, end) of a block of a q head of a sequence.
__device__ __forceinline__ SeenTiles<> walk_of_block(const SeenWords& map, int batch, int head, int block, int begin,
                                                     int end, bool down) {
  const u64* const words = words_of_block(map, batch, head, block);
  if (map.has_spans()) {
    const u64 span = words[-1];
    begin = max(begin, int(u32(span)));
    end = min(end, int(span >> 32));
  }
  return {words, begin, end, down};
}

// Iterates over the steps of a key block that a map by keys shows: the seen row tiles of each of its q heads.
template <class Params>
class SeenSteps {
 public:
  int g = 0;  // the index of the q head among those of the block

  // `begin`, `end`: limits of row tiles.
  __device__ __forceinline__ SeenSteps(const Params& p, int batch, int head, int heads, int block, int begin, int end,
                                       bool down)
      : p_(p), batch_(batch), head_(head), heads_(heads), block_(block), begin_(begin), end_(end), down_(down),
        tiles_(walk_of_block(p.expression.map, batch, head, block, begin, end, down)) {
    skip_heads();
  }
  __device__ __forceinline__ bool more() const { return tiles_.more(); }
  __device__ __forceinline__ int tile() const { return tiles_.tile; }
  __device__ __forceinline__ bool is_partial() const { return tiles_.is_partial(); }
  __device__ __forceinline__ bool next() {
    tiles_.next();
    skip_heads();
    return more();
  }

 private:
  __device__ __forceinline__ void skip_heads() {
    while (!tiles_.more() && ++g < heads_)
      tiles_ = walk_of_block(p_.expression.map, batch_, head_ + g, block_, begin_, end_, down_);
  }

  const Params& p_;
  int batch_, head_, heads_, block_, begin_, end_;
  bool down_;
  SeenTiles<> tiles_;
};

// 1 + the last key block before `block` that sees a row tile; 0 if there is none. `ascending`: the order of the
// `blocks` key blocks; otherwise they are in descending order.
template <class Params>
__device__ __forceinline__ int seen_block_before(const Params& p, int batch, int head, int tile, int block, int blocks,
                                                 bool ascending) {
  return 1 + walk_of_block(p.expression.map_of_rows, batch, head, tile, ascending ? 0 : block + 1,
                           ascending ? block : blocks, ascending)
                 .tile;
}
