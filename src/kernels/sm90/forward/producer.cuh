// The producer warp: it takes q tiles from a counter, and loads Q, K and V of each from right to left.
#pragma once
#include "attention/seen_tiles.cuh"
#include "sm90/forward/loader.cuh"
#include "sm90/forward/tile_info.cuh"

// The key tiles of a q tile that the map says are visible, and Q likewise.
template <class Params, class StripOf>
__device__ __forceinline__ void load_mapped_tiles(const Params& p, Loader& load, const QTile& q_tile, const Lengths& n,
                                                  const KeyTiles& keys, const StripOf& strip_of) {
  wait_for_earlier_kernels();  // which make the map
  SeenTiles<> seen = walk_of_block(p.expression.map, q_tile.batch, q_tile.head, q_tile.block, keys.begin, keys.end,
                                   /*down=*/true);
  const Keys source = keys_of(p, q_tile, n);
  // The map says nothing of the bounds of the call, nor of the end of the keys inside a tile.
  const int row = kStripRows * first_strip(n.sq, kConsumers, q_tile.block);
  const int end = kStripRows * first_strip(n.sq, kConsumers, q_tile.block + 1);
  const KeyRange seen_by_all = keys_seen_by_all(band_of(p), n, row, min(end, n.sq) - 1);
  const auto packed = [&] {  // the tile that the walk is at
    if (!seen.more()) return -1;
    const bool partial = is_partial(seen_by_all, seen.tile * kBlockKeys, (seen.tile + 1) * kBlockKeys);
    return pack_tile(seen.tile, (seen.is_partial() ? +kMaskedByMask : 0) |
                                    (partial ? +(!kMaskBits || kBoundsApart ? kMaskedByBounds : kMaskedByMask) : 0));
  };
  int current = packed();
  const KeyTiles first = {current, current};  // what the Views say of the tiles
  const auto load_q = [&] { load.load_q(q_tile, n, first, strip_of); };
  if (kQStages > 1 || !seen.more()) load_q();
#pragma unroll 1
  for (bool loads_q = kQStages == 1; seen.more(); loads_q = false) {
    const int tile = seen.tile;
    const bool last = !seen.next();
    const int next = packed();
    publish_tile(load.k, {tile, last ? tile : 0, packed_masked_by(current), next});
    load.load_k(source, tile, strip_of, kMaskBits && (current & kMaskedByMask));
    if (loads_q) load_q();
    load.load_v(source, tile);
    current = next;
  }
}

// The strips of a block. With a bias in P the call chooses the number of blocks (forward_plan.cpp).
__device__ __forceinline__ BlockStrips strips_of_block(const ForwardParams& p, int rows, int block, int heads) {
  return kBiasInP ? strips_of_block_of(p.work.row_blocks, rows, kConsumers, block)
                  : strips_of_block(rows, kConsumers, block, heads);
}

__device__ __forceinline__ void produce(const ForwardParams& p, u32 smem) {
  Loader load(p, smem);
  bool flip = false;
  const u32 lane = threadIdx.x % 32;
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
      if constexpr (kMapsTiles) {
        load_mapped_tiles(p, load, tile, n, keys, strip_of);
      } else {
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
    }
    // A CTA takes its next q tile only now: while it computes a long one, others are free for the next. The consumers
    // still have full buffers.
    const int next = lane == 0 ? int(gridDim.x) + atomicAdd(&p.counters[0], 1) : 0;
    number = __shfl_sync(0xffffffff, next, 0);
  }
  wait_for_earlier_kernels();  // a CTA that has loaded nothing has not waited yet
  // The last CTA to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}
