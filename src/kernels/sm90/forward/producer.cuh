// The producer warp: it takes q tiles from a counter, and loads Q, K and V of each from right to left.
#pragma once
#include "sm90/forward/loader.cuh"
#include "sm90/forward/maps/strip_tiles.cuh"
#include "sm90/forward/maps/tile_info.cuh"

// The strips of a block. With a bias in P the call chooses the number of blocks (forward_plan.cpp).
__device__ __forceinline__ BlockStrips strips_of_block(const ForwardParams& p, int rows, int block, int heads) {
  return kBiasInP ? strips_of_block_of(p.work.row_blocks, rows, kConsumers, block)
                  : strips_of_block(rows, kConsumers, block, heads);
}

// Without a map the key tiles of a q tile are consecutive.
template <class Params>
__device__ __forceinline__ void load_tiles(const Params& p, u32 smem) {
  Loader load(p, smem);
  bool flip = false;
  const int heads = kSharesBlocks ? p.group : 1;
  int number = blockIdx.x;
  for (;;) {
    const QTile tile = q_tile_of(p, number);
    const Lengths n = lengths_of(p, tile.batch);
    const BlockStrips strips = strips_of_block(p, n.sq, tile.block, heads);
    if (tile.block < 0 || kStripRows * (strips.first / heads) < n.sq) {
      const KeyTiles keys =
          kBiasInP ? key_tiles_of(p.work, band_of(p), n, strips, kBlockKeys, kSplitTail, tile)
                   : key_tiles_of(p.work, band_of(p), n, kConsumers, kBlockKeys, kSplitTail, tile, heads);
      // Under a band lower rows may see more keys, so warpgroups take turns at the bottom. The splits of a block are
      // combined strip by strip, so a warpgroup has the same strip in all of them.
      flip = kHidesKeys && !(kSplitTail && tile.split >= 0) && !flip;
      const auto strip_of = [&](int group) -> Strip {  // row n.sq: the warpgroup has none
        const int mine = strips.first + (flip ? kConsumers - 1 - group : group);
        if (mine >= strips.end) return {n.sq, tile.head};
        return {kStripRows * (mine / heads), tile.head + mine % heads};
      };
      if (tile.block < 0) {
        load.load_q(tile, n, keys, strip_of);
        break;
      }
      // With one buffer of Q, which the previous q tile may still be using, the first K comes before Q.
      if (kQStages > 1 || keys.end <= keys.begin) load.load_q(tile, n, keys, strip_of);
      const Keys source = keys_of(p, tile, n);
#pragma unroll 1
      for (KeyWalk walk = walk_of_tiles(keys); walk.more(); walk.next()) {
        load.load_k(source, walk.tile, strip_of);
        if (kQStages == 1 && walk.tile == keys.end - 1) load.load_q(tile, n, keys, strip_of);
        if constexpr (!kPairs) load.load_v(source, walk.tile);
        else if (walk.tile == keys.end - 1) load.skip_v_of_first_pair();
        else load.load_v(source, walk.tile + 1);
      }
      if constexpr (kPairs) {
        if (keys.end > keys.begin) {
          load.load_k_of_last_pair(source, keys);
          load.load_v(source, keys.begin);
          if constexpr (kCentersV) prefetch_means(p, source.means, keys);
        }
      }
    }
    // A CTA takes its next q tile only now: while it computes a long one, others are free for the next. The consumers
    // still have full buffers.
    number = take_number(p);
  }
}

// With a map they are those that some strip sees. The words of a q tile are read before the last V of the one before is
// loaded: otherwise the consumers would be done with what the rings hold before the next tiles arrive.
template <class Params>
__device__ __forceinline__ void load_mapped_tiles(const Params& p, u32 smem) {
  Loader load(p, smem);
  MappedTile at;
  const auto strip_of = [&](int group) { return at.strip_of(group); };
  Keys source;
  int v_tile = -1;  // whose V is loaded next; -1: there is none
  QTile tile = q_tile_of(p, blockIdx.x);
  for (;; tile = sorted_q_tile_of(p, smem, take_number(p))) {
    at.go_to(p, tile);
    if (v_tile >= 0) load.load_v(source, v_tile);
    v_tile = -1;
    if (at.tile.block < 0) break;
    if (!at.has_rows()) continue;
    source = keys_of(p, at.tile, at.n);
    const FirstTile first = first_tile(at.seen.packed());
    bool loads_q = true;
    if (kQStages > 1 || !at.seen.more()) {
      load.load_q(at.tile, at.n, first, strip_of);
      loads_q = false;
    }
#pragma unroll 1
    while (at.seen.more()) {
      const int tile = at.seen.tile;
      const bool masked = kMaskBits && at.seen.mask_hides();
      at.seen.next(p.expression.map);
      const NextTile next = at.seen.published();  // found while V's buffer is in use
      if (v_tile >= 0) load.load_v(source, v_tile);
      v_tile = tile;
      publish_next_tile(load.k, next);
      load.load_k(source, tile, strip_of, masked);
      if (loads_q) load.load_q(at.tile, at.n, first, strip_of);
      loads_q = false;
    }
  }
  load.load_q(at.tile, at.n, FirstTile{}, strip_of);
}

template <class Params>
__device__ __forceinline__ void produce(const Params& p, u32 smem) {
  if constexpr (kMapsTiles) load_mapped_tiles(p, smem);
  else load_tiles(p, smem);
  wait_for_earlier_kernels();  // a CTA that has loaded nothing has not waited yet
  // The last CTA to finish clears the counters for the next launch.
  if (threadIdx.x % 32 == 0 &&
      atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}
