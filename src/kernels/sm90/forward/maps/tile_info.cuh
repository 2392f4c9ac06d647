// Where a map says which key tiles are visible (kMapsTiles), the producer publishes a TileInfo with each K, and the
// consumers read it.
#pragma once
#include "device/memory.cuh"
#include "sm90/forward/rings.cuh"

// Where the TileInfo of the tile in K's current buffer lies.
__device__ __forceinline__ u32 tile_info_address(const KBuffers& k) {
  return k.smem + kLayout.tile_info + sizeof(TileInfo) * k.ring.stage();
}

// A tile that each lane i < kConsumers has packed for the strip of warpgroup i.
__device__ __forceinline__ TileInfo tile_info(int packed) {
  TileInfo info = {};
#pragma unroll
  for (int i = 0; i < kConsumers; ++i) info.next[i] = __shfl_sync(0xffffffff, packed, i);
  return info;
}

// The next tile, which lanes have packed as above, comes with the one that is loaded to K's current buffer.
__device__ __forceinline__ void publish_next_tile(const KBuffers& k, int packed) {
  k.wait_empty();
  const int lane = threadIdx.x % 32;
  if (lane < kConsumers) store_shared(tile_info_address(k) + sizeof(int) * lane, packed);
  __syncwarp();
}

// A consumer must know before it issues the products of a tile what masks it. It reads that while it computes the tile
// before.
struct NextTile {
  int packed;

  // Before K is released.
  __device__ __forceinline__ void load(const KBuffers& k) {
    packed = kMapsTiles ? load_shared(tile_info_address(k) + sizeof(int) * consumer()) : 0;
  }
  // Not before there are scores: the shuffle then runs while O += P V is multiplied.
  __device__ __forceinline__ void make_uniform(const float (&S)[kBlockKeys / 2]) {
    if constexpr (kMapsTiles) packed = uniform(same_after(packed, S[0]));
  }
  __device__ __forceinline__ void set(KeyWalk& walk) const {
    if constexpr (kMapsTiles) walk.set_next(packed);
  }
};

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
      NextTile next;
      kv.wait_k();
      next.load(kv.k);
      next.packed = uniform(next.packed);
      kv.skip(1);
      next.set(walk);
      walk.next();
    }
  }
  return walk.more();
}
