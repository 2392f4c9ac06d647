// Sizes, the map of shared memory and the named barriers of the Hopper forward kernel.
#pragma once
#include "plan.h"
#include "shared/strips.h"

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kHeadPanels = (kHeadDim + 63) / 64,  // buffers are panels of 64 columns = 128 bytes, swizzled
  kValuePanels = (kValueDim + 63) / 64,
  kPanelRowBytes = 128,
  kStripPanelBytes = kStripRows * kPanelRowBytes,
  kStripBytes = kStripPanelBytes * (kHeadPanels > kValuePanels ? kHeadPanels : kValuePanels),  // Q, later O
  kQBytes = kConsumers * kStripBytes,
  kPanelBytes = kBlockKeys * kPanelRowBytes,
  kKBytes = kHeadPanels * kPanelBytes,
  kVBytes = kValuePanels * kPanelBytes,
};

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
  sLast = sView + 48 * kQStages * kConsumers,  // one int per consumer: its part is the last to finish
};

enum NamedBarrier : u32 { kBarrierConsumer = 1 };  // one per consumer warpgroup
