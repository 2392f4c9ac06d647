// The layouts of shared memory and of dS in the workspace, for the constants of kernel_config.h.
#pragma once
#include "attention/mask_bits.cuh"
#include "backward/layout.cuh"
#include "sm90/backward/layout.h"

__device__ constexpr BackwardTile kTile = {kOperands, kHeadDim, kValueDim, kConsumers, kBlockRows, kBlockKeys, kKStages,
                                           kQStages, kOStages,  kDsStages,  kRowTiles,  kRowStages, kDqStages,
                                           bool(kMaskBits), kBiasTile, bool(kBiasRows)};
__device__ constexpr KeysLayout kKeysLayout =
    kBlockKeys < 64 * kConsumers ? keys_wide_layout(kTile) : keys_layout(kTile);
__device__ constexpr RowsLayout kRowsLayout = rows_layout(kTile);

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kKeysThreads = 128 * (kConsumers + 1 + kAccumulatesDq),  // of keys.cu
  kQPanels = panels_of(ElementQ::kType, kHeadDim),
  kKPanels = panels_of(ElementK::kType, kHeadDim),
  kVPanels = panels_of(ElementV::kType, kValueDim),
  kOPanels = panels_of(ElementO::kType, kValueDim),
  kLastColumns = kHeadDim - 64 * (kDqPanels - 1),  // columns of the last panel of dQ
  kRowSteps = kBlockRows / kDsTileRows,              // dS tiles of a score tile along its rows
  kDsTilesOfScoreTile = kRowSteps * kBlockKeys / kDsTileKeys,
  kMaskWords = kMaskBits ? kBlockRows / kMaskWordColumns : 0,  // per thread and step
  kScoreTileBytes = kDsTilesOfScoreTile * kDsTileBytes,
  kDqTilesOfStep = kRowSteps * kDqPanels,
  // The last key blocks may be cut into two work tiles if all rows see all of them, apart from a bool mask.
  kCuts = kDqMethod == int(DqMethod::kAtomic) && !kPacked && (!kHidesKeys || (kMaskBits && !kHasLeft && !kHasRight)),
};

// The places of dS, with the fields that kernel_config.h fixes as constants.
__device__ __forceinline__ ScoreTiles score_tiles_of(const BackwardParams& p) {
  ScoreTiles store = p.score_tiles;
  if (kPacked || kSeqUsedQ || kHasLeft || !kHasRight) __builtin_assume(store.pitch > 0);
  if (!kPacked) store.compact = false;
  return store;
}
