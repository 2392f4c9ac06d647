// Where a map says which key tiles are visible (kMapsTiles), the producer publishes a TileInfo with each K, and the
// consumers read it.
#pragma once
#include "device/memory.cuh"
#include "sm90/forward/rings.cuh"

// Where the TileInfo of the tile in K's current buffer lies: its part for a strip.
__device__ __forceinline__ u32 next_tile_address(const KBuffers& k, u32 strip) {
  return k.smem + kLayout.tile_info + sizeof(TileInfo) * k.ring.stage() + sizeof(NextTile) * strip;
}

// The first tile, which each lane i < kConsumers has packed for the strip of warpgroup i.
struct FirstTile {
  int packed[kConsumers];
};
__device__ __forceinline__ FirstTile first_tile(int packed) {
  FirstTile first;
#pragma unroll
  for (int i = 0; i < kConsumers; ++i) first.packed[i] = __shfl_sync(0xffffffff, packed, i);
  return first;
}

// With K, which is loaded to its current buffer next, comes what each lane i < kConsumers says of the strip of
// warpgroup i.
__device__ __forceinline__ void publish_next_tile(const KBuffers& k, const NextTile& next) {
  k.wait_empty();
  const int lane = threadIdx.x % 32;
  if (lane < kConsumers) {
    store_shared(next_tile_address(k, lane), next.packed);
    store_shared(next_tile_address(k, lane) + sizeof(int), next.alike);
  }
  __syncwarp();
}

// A consumer hears of the tile after the one in K's current buffer. It loads that before the products of a tile, for
// which it waits anyway, and shuffles only at the end of a run.
__device__ __forceinline__ void load_next_tile(KvBuffers& kv) {
  if constexpr (kMapsTiles) {
    const u32 at = next_tile_address(kv.k, consumer());
    kv.next = {int(load_shared(at)), int(load_shared(at + sizeof(int)))};
  }
}
__device__ __forceinline__ void set_next_tile(KeyWalk& walk, const KvBuffers& kv) {
  if constexpr (kMapsTiles) walk.set_next({uniform(kv.next.packed), uniform(kv.next.alike)});
}

// Moves the walk to the next tile. Returns whether the strip sees some of it: at the end of the walk it does not.
__device__ __forceinline__ bool next_in_run(KeyWalk& walk) {
  if constexpr (!kSkipsTiles) return walk.next();
  walk.next();
  return walk.sees_tile();
}

// Releases the tiles of which the strip sees nothing, from that of the walk on. Returns whether one is left.
__device__ __forceinline__ bool skip_unseen(KvBuffers& kv, KeyWalk& walk) {
  if constexpr (kSkipsTiles) {
#pragma unroll 1
    while (walk.more() && !walk.sees_tile()) {
      kv.wait_k();
      load_next_tile(kv);
      set_next_tile(walk, kv);
      kv.skip(1);
      walk.next();
    }
  }
  return walk.more();
}
