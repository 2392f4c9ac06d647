// The two products of a tile: a warp's by mma.sync where a warp group has few rows, a warpgroup's by wgmma where it has
// 64. Both leave the same fragments (sm90/common/fragment.cuh).
#pragma once
#include "sm90/ptx/descriptor.cuh"
#include "device/mma_sync.cuh"
#include "sm90/decode/load.cuh"

enum : int {
  kProductRows = kWarpgroupPath ? 64 : kWarpRows,
  kQPanelBytes = kBlockRows * 128,
};

// S = Q K^T by wgmma, on its way.
__device__ __forceinline__ void issue_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 Q = uniform_descriptor(q, 0);
  const u32 K = uniform_descriptor(k, 0);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int inside = step % 4 * 32;
    Wgmma<kBlockKeys>::multiply<kAlongK, kAlongK>(S, Q + ((step / 4 * kQPanelBytes + inside) >> 4),
                                                  K + ((step / 4 * kPanelBytes + inside) >> 4), step != 0);
  }
  wgmma_commit();
}

// O += P V by wgmma, on its way.
__device__ __forceinline__ void issue_values(float (&O)[kValueDim / 2], const u32 (&P)[kBlockKeys / 4], u32 v) {
  const u32 V = uniform_descriptor(v, kPanelBytes);
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; ++step)
    Wgmma<kValueDim>::multiply<kAcrossK>(O, P + 4 * step, V + (step * 16 * 128 >> 4), 1);
  wgmma_commit();
}

// S = Q K^T of the rows whose Q lies at `q`, and the tile at `k`, by mma.sync.
__device__ __forceinline__ void multiply_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) S[i] = 0;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    u32 a[4];
    load_shared_matrices(q + step / 4 * kQPanelBytes + swizzled(lane % 16, step % 4 * 2 + lane / 16), a);
#pragma unroll
    for (int keys = 0; keys < kBlockKeys; keys += 16) {
      u32 b[4];
      const u32 row = keys + lane % 8 + lane / 16 * 8;
      load_shared_matrices(k + step / 4 * kPanelBytes + swizzled(row, step % 4 * 2 + lane / 8 % 2), b);
      multiply_16_8_16(S + keys / 2, a, b[0], b[1]);
      multiply_16_8_16(S + keys / 2 + 4, a, b[2], b[3]);
    }
  }
}

// O += P V by mma.sync.
__device__ __forceinline__ void multiply_values(float (&O)[kValueDim / 2], const u32 (&P)[kBlockKeys / 4], u32 v) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int keys = 0; keys < kBlockKeys; keys += 16)
#pragma unroll
    for (int column = 0; column < kValueDim; column += 16) {
      u32 b[4];
      load_shared_matrices_transposed(
          v + column / 64 * kPanelBytes + swizzled(keys + lane % 16, column % 64 / 8 + lane / 16), b);
      multiply_16_8_16(O + column / 2, P + keys / 4, b[0], b[1]);
      multiply_16_8_16(O + column / 2 + 4, P + keys / 4, b[2], b[3]);
    }
}

// The products of a warp or a warpgroup over the tiles of a work tile.
template <bool wide>
class Products;

// A warp's: O takes a tile at once.
template <>
class Products<false> {
 public:
  __device__ __forceinline__ Products(const Tiles<false>& tiles, int) : tiles_(tiles) {}

  // S of the next tile, which is the work tile's `first`. Warps without rows wait with the others. `sync` is a barrier
  // of the warp group.
  template <class Sync>
  __device__ __forceinline__ void scores(bool has_rows, bool, float (&S)[kBlockKeys / 2], float (&)[kValueDim / 2],
                                         u32 (&)[kBlockKeys / 4], u32 q, Sync sync) {
    const u32 k = tiles_.keys(sync);
    if (has_rows) multiply_scores(S, q, k);
  }
  // V of that tile.
  __device__ __forceinline__ u32 v() const { return tiles_.values(); }
  // O takes it, at once or with the next scores.
  __device__ __forceinline__ void values(bool has_rows, float (&O)[kValueDim / 2], u32 (&P)[kBlockKeys / 4]) {
    if (has_rows) multiply_values(O, P, tiles_.values());
    tiles_.advance();
  }
  // O takes the last tile.
  __device__ __forceinline__ void finish(float (&)[kValueDim / 2], u32 (&)[kBlockKeys / 4]) {}

 private:
  Tiles<false> tiles_;
};

// A warpgroup's: O += P V of a tile goes with S = Q K^T of the next one. The two warpgroups of a warp group take turns,
// so that one multiplies while the other one is at its softmax.
template <>
class Products<true> {
 public:
  __device__ __forceinline__ Products(const Tiles<true>& tiles, int warp_of_group)
      : tiles_(tiles), group_(warp_of_group / 4) {
    if (group_ == 1) pass();
  }

  template <class Sync>
  __device__ __forceinline__ void scores(bool, bool first, float (&S)[kBlockKeys / 2], float (&O)[kValueDim / 2],
                                         u32 (&P)[kBlockKeys / 4], u32 q, Sync) {
    const u32 k = tiles_.keys();
    const u32 v = first ? 0 : tiles_.values();
    if (kAlternates) named_barrier_sync(kAlternate + group_, 256);
    register_fence(O);
    register_fence(P);
    wgmma_fence();
    issue_scores(S, q, k);
    if (!first) issue_values(O, P, v);
    if (kAlternates) pass();
    wgmma_wait<0>();
    register_fence(S);
    register_fence(O);
    tiles_.release_keys();
    if (!first) tiles_.release_values();
  }
  __device__ __forceinline__ u32 v() const { return tiles_.values(); }
  __device__ __forceinline__ void values(bool, float (&)[kValueDim / 2], u32 (&)[kBlockKeys / 4]) {}
  __device__ __forceinline__ void finish(float (&O)[kValueDim / 2], u32 (&P)[kBlockKeys / 4]) {
    const u32 v = tiles_.values();
    register_fence(O);
    register_fence(P);
    wgmma_fence();
    issue_values(O, P, v);
    wgmma_wait<0>();
    register_fence(O);
    tiles_.release_values();
  }

 private:
  enum : int { kAlternates = kWarpsPerGroup == 8 };
  __device__ __forceinline__ void pass() const { named_barrier_arrive(kAlternate + 1 - group_, 256); }

  Tiles<true> tiles_;
  int group_;
};
