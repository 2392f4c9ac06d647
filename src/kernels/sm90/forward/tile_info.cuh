// Where a map says which key tiles are visible (kMapsTiles), the producer publishes a TileInfo with each K, and the
// consumers read it.
#pragma once
#include "device/memory.cuh"
#include "sm90/forward/rings.cuh"

// Where the TileInfo of the tile in K's current buffer lies.
__device__ __forceinline__ u32 tile_info_address(const KBuffers& k) {
  return k.smem + kLayout.tile_info + sizeof(TileInfo) * k.ring.stage();
}

__device__ __forceinline__ void publish_tile(const KBuffers& k, const TileInfo& info) {
  k.wait_empty();
  if (elect_one()) store_shared_struct(tile_info_address(k), info);
  __syncwarp();
}

// Moves the walk to the tile in K's current buffer.
__device__ __forceinline__ void read_tile(const KBuffers& k, KeyWalk& walk) {
  if constexpr (kMapsTiles && !kMaskBits) walk.go_to(load_shared_struct_uniform<TileInfo>(tile_info_address(k)));
}

// With a mask of bits a consumer must know before it issues the products of a tile what masks it. It reads that while
// it computes the tile before.
struct NextTile {
  int packed;

  // Before K is released.
  __device__ __forceinline__ void load(const KBuffers& k) {
    packed = kMaskBits ? load_shared(tile_info_address(k) + sizeof(TileInfo) - sizeof(int)) : 0;
  }
  // Not before there are scores: the shuffle then runs while O += P V is multiplied.
  __device__ __forceinline__ void make_uniform(const float (&S)[kBlockKeys / 2]) {
    if constexpr (kMaskBits) packed = uniform(same_after(packed, S[0]));
  }
  __device__ __forceinline__ void set(KeyWalk& walk) const {
    if constexpr (kMaskBits) walk.set_next(packed);
  }
};
