// The sizes and the map of shared memory that kernel_config.h leads to, and the named barriers.
#pragma once
#include "kernel_config.h"
#include "sm90/forward/layout.h"

__device__ constexpr ForwardLayout kLayout =
    forward_layout({kHeadDim, kValueDim, kConsumers, kBlockKeys, kQStages, kKStages, kVStages});
static_assert(kLayout.end <= kLayout.bytes);

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kResidents = kConsumers == 1 ? 2 : 1,  // CTAs that the registers of an SM hold
  kHeadPanels = panels_of(kHeadDim),
  kValuePanels = panels_of(kValueDim),
  kPanelBytes = kBlockKeys * kPanelRowBytes,  // of K and V
};

enum NamedBarrier : u32 { kBarrierConsumer = 1 };  // one per consumer warpgroup
