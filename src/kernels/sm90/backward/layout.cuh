// The layouts of shared memory and of dS in the workspace, for the constants of kernel_config.h.
#pragma once
#include "kernel_config.h"
#include "sm90/backward/layout.h"
#include "sm90/backward/params.h"

__device__ constexpr BackwardTile kTile = {kHeadDim, kValueDim, kConsumers, kBlockRows, kBlockKeys, kKStages,
                                           kQStages, kOStages,  kDsStages,  kRowTiles,  kRowStages, kDqStages};
__device__ constexpr KeysLayout kKeysLayout =
    kBlockKeys < 64 * kConsumers ? keys_wide_layout(kTile) : keys_layout(kTile);
__device__ constexpr RowsLayout kRowsLayout = rows_layout(kTile);
__device__ constexpr ScoreTile kScoreTile = {kBlockRows, kBlockKeys};

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kAccumulatesDq = kDqMethod != int(DqMethod::kStored),
  kOrderedDq = kDqMethod == int(DqMethod::kOrdered),
  kKeysThreads = 128 * (kConsumers + 1 + kAccumulatesDq),  // of keys.cu
  kHeadPanels = panels_of_columns(kHeadDim),
  kValuePanels = panels_of_columns(kValueDim),
  kLastColumns = kHeadDim - 64 * (kHeadPanels - 1),  // columns of the last panel of Q and K
  kRowSteps = kBlockRows / kDsTileRows,              // dS tiles of a score tile along its rows
  kDsTilesOfScoreTile = kRowSteps * kBlockKeys / kDsTileKeys,
  kScoreTileBytes = kDsTilesOfScoreTile * kDsTileBytes,
  kDqTilesOfStep = kRowSteps * kHeadPanels,
  // The last key blocks may be cut into two work tiles.
  kCuts = kDqMethod == int(DqMethod::kAtomic) && !kHidesKeys && !kPacked,
};

// The places of dS, with what kernel_config.h fixes of them told to the compiler.
__device__ __forceinline__ ScoreTiles score_tiles_of(const BackwardParams& p) {
  ScoreTiles store = p.score_tiles;
  if (kPacked || kSeqUsedQ || kHasLeft || !kHasRight) __builtin_assume(store.pitch > 0);
  if (!kPacked) store.compact = false;
  return store;
}
