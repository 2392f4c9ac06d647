// The maps of shared memory, and where dS lies in the workspace, as kernel_config.h leads to them.
#pragma once
#include "kernel_config.h"
#include "sm90/backward/layout.h"
#include "sm90/backward/params.h"

__device__ constexpr BackwardTile kTile = {kHeadDim, kValueDim, kConsumers, kBlockRows, kBlockKeys, kKStages,
                                           kQStages, kOStages,  kDsStages,  kRowTiles,  kRowStages, kSumsStages};
__device__ constexpr KeysLayout kKeysLayout =
    kBlockKeys < 64 * kConsumers ? keys_wide_layout(kTile) : keys_layout(kTile);
__device__ constexpr RowsLayout kRowsLayout = rows_layout(kTile);
__device__ constexpr ScoreTile kScoreTile = {kBlockRows, kBlockKeys};

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kKeysThreads = 128 * (kConsumers + 1 + kSums),  // of sm90/backward/keys.cu
  kHeadPanels = panels_of_columns(kHeadDim),
  kValuePanels = panels_of_columns(kValueDim),
  kLastColumns = kHeadDim - 64 * (kHeadPanels - 1),  // of the head dim's last panel
  kRowSteps = kBlockRows / kPieceRows,            // pieces of a tile of dS along its rows
  kPiecesOfTile = kRowSteps * kBlockKeys / kPieceKeys,
  kTileBytes = kPiecesOfTile * kPieceBytes,       // of dS
  kStepUnits = kRowSteps * kHeadPanels,           // of dQ
  kCuts = kSums && !kOrdered && !kHasLeft && !kHasRight && !kPacked,  // the last blocks of keys may be cut
};

// With what the plan fixes of it, so that the compiler computes no other places.
__device__ __forceinline__ ScoreTiles score_tiles_of(const BackwardParams& p) {
  ScoreTiles store = p.score_tiles;
  if (kPacked || kSeqUsedQ || kHasLeft || !kHasRight) __builtin_assume(store.pitch > 0);
  if (!kPacked) store.compact = false;
  return store;
}
