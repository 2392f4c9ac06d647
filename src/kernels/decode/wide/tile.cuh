// The tile of the wide path: which rows, keys and columns a warp has, and how K and V are cut into chunks.
//
// A CTA has one warp group. kColumnShares of its warps have the same rows: they share the keys of a tile, of which
// each computes the scores, and the columns of O. K and V come to shared memory in chunks of kChunkBytes: some columns
// of all keys of a tile of K, some keys with all columns of V.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/cta.cuh"

static_assert(kColumnShares > 1 && kWarpGroups == 1 && kHeads == 1 && kBoxKeys == 0 && kComputeWarps == kCtaWarps);

enum : int {
  kRowsOfStrips = kWarpRows * kWarpStrips,  // of a warp
  kWarpKeys = kBlockKeys / kColumnShares,   // of a tile, of which a warp computes the scores
  kShareColumns = columns_of_share(kTile),  // of O of a warp; the last shares may have fewer
  kKChunkPanels = columns_of_key_chunk(kTile) / ElementK::kPanelColumns,
  kVChunkKeys = keys_of_value_chunk(kTile),
  kVChunkPanelBytes = kVChunkKeys * kPanelRowBytes,
  kVChunks = kBlockKeys / kVChunkKeys,
  kKChunks = chunks_of_wide_tile(kTile) - kVChunks,
  kPPanelBytes = kBlockRows * kPanelRowBytes,  // of P: a panel has 64 keys
};
static_assert(kKChunkPanels > 0 && kWarpKeys % 16 == 0 && ElementV::kBytes == 2);

// The place of a warp in the CTA.
struct WideWarp {
  int share, first_row;

  __device__ __forceinline__ WideWarp() {
    const int warp = uniform(threadIdx.x / 32);
    share = warp % kColumnShares;
    first_row = warp / kColumnShares * kRowsOfStrips;
  }
  __device__ __forceinline__ int first_key() const { return share * kWarpKeys; }            // of a tile
  __device__ __forceinline__ int first_column() const { return share * kShareColumns; }  // of O
  // Whether the share has the 16 columns from `column` on, counted from its first one.
  __device__ __forceinline__ bool has_columns(int column) const {
    return kShareColumns * kColumnShares == kValueDim || first_column() + column < kValueDim;
  }
};

// What a thread has of each strip of its warp.
using WideScores = float[kWarpStrips][kWarpKeys / 2];
using WideOutput = float[kWarpStrips][kShareColumns / 2];
