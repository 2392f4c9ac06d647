// Sizes, the map of shared memory and the named barriers of the Hopper forward kernel.
#pragma once
#include "plan.h"
#include "shared/mbarrier.cuh"

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kHeadPanels = (kHeadDim + 63) / 64,  // tiles lie in shared memory as panels of 64 columns = 128 bytes, swizzled
  kValuePanels = (kValueDim + 63) / 64,
  kPanelRowBytes = 128,
  kQGroupBytes = 64 * kPanelRowBytes * (kHeadPanels > kValuePanels ? kHeadPanels : kValuePanels),  // Q, later O, of one warpgroup
  kQBytes = kConsumers * kQGroupBytes,
  kPanelBytes = kBlockKeys * kPanelRowBytes,
  kKBytes = kHeadPanels * kPanelBytes,
  kVBytes = kValuePanels * kPanelBytes,
  kSumLimit = FULGUR_INPUT[0] == 'b' ? 1 << 24 : 1 << 12,  // of a row of P before the maximum moves; f16 holds 65504 at most
};

enum Store { kStoreTiles, kStoreRows, kStoreElements };

// Shared memory, byte offsets from a base aligned to 1024.
enum : u32 {
  sQ = 0,
  sK = sQ + kQStages * kQBytes,
  sV = sK + kKStages * kKBytes,
  sBarriers = sV + kVStages * kVBytes,
  sQFull = sBarriers,
  sQEmpty = sQFull + 8 * kQStages,
  sKFull = sQEmpty + 8 * kQStages,
  sKEmpty = sKFull + 8 * kKStages,
  sVFull = sKEmpty + 8 * kKStages,
  sVEmpty = sVFull + 8 * kVStages,
  sVTail = sVEmpty + 8 * kVStages,
  sView = (sVTail + 8 + 15) / 16 * 16,         // one View per Q buffer and consumer
  sLast = sView + 48 * kQStages * kConsumers,  // one int per consumer: this part of a split tile is the last to finish
};

enum NamedBarrier : u32 { kBarrierConsumer = 1 };  // one per consumer warpgroup
