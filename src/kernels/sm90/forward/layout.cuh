// The sizes and the map of shared memory that kernel_config.h leads to, and the named barriers.
#pragma once
#include "attention/mask_bits.cuh"
#include "device/operands.cuh"
#include "sm90/forward/layout.h"

__device__ constexpr ForwardLayout kLayout =
    forward_layout({kOperands, kHeadDim, kValueDim, kConsumers, kBlockKeys, kQStages, kKStages, kVStages, kBiasTile,
                    bool(kBiasRows), bool(kPairs), bool(kMapsTiles), bool(kMaskBits)});
static_assert(kLayout.end <= kLayout.bytes);
static_assert(!kPairs || (kKStages == kVStages && !kBias && !kMapsTiles));

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kResidents = kConsumers == 1 ? 2 : 1,  // CTAs that the registers of an SM hold
  kQPanels = panels_of(ElementQ::kType, kHeadDim),
  kKPanels = panels_of(ElementK::kType, kHeadDim),
  kVPanels = panels_of(ElementV::kType, kValueDim),
  kOPanels = panels_of(ElementO::kType, kValueDim),
  kPanelBytes = kBlockKeys * kPanelRowBytes,  // of K and V
  kCentersV = ElementV::kType == kE4M3,       // V lies in steps (sm90/forward/values.cuh)
  kOThroughQ = kQStages > 1 && !kCentersV,    // O leaves through the buffer that Q was in
  kBiasInRegisters = bias_in_registers(kBiasTile, kConsumers),
  // In the registers of the P that is not being multiplied, two tiles a turn. Of narrow heads that was slower.
  kBiasInP = kBiasInRegisters && kValueDim > 64,
  // A strip's softmax overlaps with its own products: of wide heads of codes, where the tensor cores bind, and with a
  // bias, for which it is long. Others want registers.
  kDoubleBuffersP = (kCentersV && kValueDim > 128 && kScoreMode == 0) || kBiasInP,
  kVStepBytes = ElementV::kStep * (kCentersV ? kValueDim : +kPanelRowBytes),  // of V, that a product takes
  kBiasPanels = bias_panels(kBiasTile, kBlockKeys),
  kBiasWords = kBiasInRegisters ? kBlockKeys / 4 : 0,  // of a thread
  kMaskWords = kMaskBits ? mask_words(kBlockKeys) : 0,  // of a thread, of a key tile
  kMaskTileBytes = kMaskWords * kMaskThreads * 4,        // of a strip
  // Of a mask of bits, those of keys after the last one are 0; what bounds hide besides, the mask does not say.
  kBoundsApart = kHasLeft || kHasRight || kHasChunk || kSeqUsedK,
  kBiasTiles = kBiasRows ? kConsumers : 1,
  kBiasBoxBytes = kBiasRows ? kStripPanelBytes : kPanelRowBytes,
};

static_assert(!kBiasInRegisters || !(kPacked || kSeqUsedQ || kDropout));

enum NamedBarrier : u32 { kBarrierConsumer = 1 };  // one per consumer warpgroup
