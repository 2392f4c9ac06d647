// The constants of a CTA: its tile, the roles of its warps, its map of shared memory, and its barriers.
#pragma once
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "host_device/stream_k.h"
#include "decode/codes/formats.cuh"
#include "sm90/ptx/mbarrier.cuh"

constexpr DecodeTile kTile = {kOperands,      {StoredQ::kType, StoredK::kType, StoredV::kType, ElementO::kType},
                              kHeads > 1 ? scale_pitches_before(kScaleTensors) / 4 : scale_words_before(kScaleTensors),
                              kHeads,
                              kKPiece,        kVPiece,
                              kHeadDim,       kValueDim,
                              kWarpsPerGroup, kWarpGroups,
                              kTileRows,      kBlockKeys,
                              kBoxKeys,       kKStages,
                              kVStages,       kCodeStages,
                              kConvertWarps,  kColumnShares,
                              kWarpStrips,    kChunkBytes,
                              kColumnGroups};

enum : int {
  kWarpgroupPath = is_warpgroup_path(kTile),  // decode_warpgroup.cu, else decode_warp.cu or decode_codes.cu
  kWidePath = is_wide_path(kTile),            // wide/decode_wide.cu
  kConverts = kConvertWarps > 0,              // the warps that load convert codes
  kConvertsInRegisters = converts_in_registers(kTile),  // the warpgroups do
  kStoredByLanes = kConverts || kBoxKeys == 0,          // tiles that products read, not by TMA
  kComputeWarps = kWarpGroups * kWarpsPerGroup * kColumnGroups,
  kComputeThreads = 32 * kComputeWarps,
  kCtaWarps = decode_warps(kTile),
  kCtaThreads = 32 * kCtaWarps,
  kBlockRows = rows_of_block(kTile),
  kRowsOfWarp = rows_of_warp(kTile),  // of Q in shared memory
  kQueryRows = kRowsOfWarp * kWarpsPerGroup,
  kQPanelBytes = kQueryRows * kPanelRowBytes,
  kWarpGroupThreads = 32 * kWarpsPerGroup,
  kWarpColumns = kValueDim / kColumnGroups,  // of O that a warp has
  kFirstLoadWarp = kComputeWarps % kCtaWarps,  // warps that load come after those that compute, or are the same
  kLoadsAhead = kComputeWarps == kCtaWarps,    // a warp loads for its own products
  kKeysPerChunk = chunk_keys(kBlockKeys),      // of stream-K
  kHeadRows = kTileRows / kHeads,              // rows of a kv head
  kGroupOfHead = kGroup / kHeads,              // q heads of a kv head
  // Warps that load a tile together; where they convert codes, of K and as many others of V.
  kGroupLoaders = (kWarpgroupPath ? kCtaWarps - kComputeWarps : int(kLoadWarps)) / kWarpGroups,
  kTileLoaders = kConverts        ? kGroupLoaders / 2
                 : kWarpgroupPath ? int(kGroupLoaders)
                 : kHeads > 1     ? 1
                                  : int(kWarpsPerGroup),
};

// The panels of a tile of K and of V.
enum : int {
  kKPanels = panels_of(StoredK::kType, kHeadDim),
  kVPanels = panels_of(StoredV::kType, kValueDim),
  kPanelBytes = kBlockKeys * kPanelRowBytes,  // of 16-bit elements
  kKRowBytes = panel_row_bytes(StoredK::kType, kHeadDim),
  kVRowBytes = panel_row_bytes(StoredV::kType, kValueDim),
};

constexpr DecodeLayout kLayout = decode_layout(kTile);

extern __shared__ __align__(1024) unsigned char raw[];

__device__ __forceinline__ u32 shared_base() { return u32(__cvta_generic_to_shared(raw)); }

// Named barriers: at kTileBarrier and the next ones the warps of a warp group meet, which share tiles of K and V; at
// kSoftmaxBarrier and the next ones the warps of a warpgroup that converts codes in registers, which share P; at
// kAlternate and the next one two warpgroups of a warp group alternate, or each passes its P to the other one; at
// kComputeBarrier all warp groups meet where they are not the whole CTA; at kFirstQuery the warps that load wait until
// the warp groups have requested their first Q.
enum : int { kTileBarrier = 1, kSoftmaxBarrier = 4, kAlternate = 8, kComputeBarrier = 10, kFirstQuery = 11 };

// A barrier of a warp group, whose warps share rows of K and V, or of one of its warpgroups with columns of O of its
// own. With kHeads each warp has rows of its own, which share 16 bytes with those of the next head if they begin in the
// middle of these. The loop makes the barrier's number a constant, without which the compiler reserves all 16.
__device__ __forceinline__ void sync_warp_group(int warp_group) {
  if constexpr (kWarpsPerGroup == 1 || (kHeads > 1 && kVPiece != kMiddle)) {
    __syncwarp();
  } else {
#pragma unroll
    for (int i = 0; i < kWarpGroups * kColumnGroups; ++i)
      if (warp_group == i) named_barrier_sync(kTileBarrier + i, kWarpGroupThreads);
  }
}

// The first column of O that a warp has, of kWarpColumns.
__device__ __forceinline__ int first_column_of_warp() {
  return kColumnGroups == 1 ? 0 : int(threadIdx.x / kWarpGroupThreads) * kWarpColumns;
}

// A barrier of all warp groups.
__device__ __forceinline__ void sync_compute_warps() {
  if (kComputeWarps == kCtaWarps)
    __syncthreads();
  else
    named_barrier_sync(kComputeBarrier, kComputeThreads);
}

// The kv head of a warp, among those that its CTA reads together.
__device__ __forceinline__ int head_of_warp() { return kHeads == 1 ? 0 : int(threadIdx.x / 32 % kHeads); }
