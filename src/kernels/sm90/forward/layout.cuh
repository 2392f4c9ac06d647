// The sizes and the map of shared memory that kernel_config.h leads to, and the named barriers.
#pragma once
#include "attention/mask_bits.cuh"
#include "device/operands.cuh"
#include "sm90/forward/layout.h"

__device__ constexpr ForwardLayout kLayout =
    forward_layout({kOperands, kHeadDim, kValueDim, kConsumers, kBlockKeys, kQStages, kKStages, kVStages, kBiasTile,
                    bool(kBiasRows), bool(kPairs), bool(kMapsTiles), bool(kMaskBits)});
static_assert(kLayout.end <= kLayout.bytes);

enum : int {
  kThreads = 128 * (kConsumers + 1),
  kResidents = kConsumers == 1 ? 2 : 1,  // CTAs that the registers of an SM hold
  kQPanels = panels_of(ElementQ::kType, kHeadDim),
  kKPanels = panels_of(ElementK::kType, kHeadDim),
  kVPanels = panels_of(ElementV::kType, kValueDim),
  kOPanels = panels_of(ElementO::kType, kValueDim),
  kPanelBytes = kBlockKeys * kPanelRowBytes,  // of K and V
  kCentersV = ElementV::kType == kE4M3,       // V comes centred, in steps of products (sm90/forward/values.cuh)
  kOThroughQ = kQStages > 1 && !kCentersV,    // TMA stores O from the buffer of its Q
  kBiasInRegisters = bias_in_registers(kBiasTile, kConsumers),
  // The words of the bias lie in the buffer of P that is not being multiplied.
  kBiasInP = bias_in_p(kBiasTile, kConsumers, kValueDim),
  // A warpgroup computes P of a tile while it multiplies P V of the tile before. That pays with wide heads of codes,
  // where the tensor cores bind, and with a bias, whose softmax is long. Other kernels lack the registers.
  kDoubleBuffersP = (kCentersV && kValueDim > 128 && kScoreMode == 0) || kBiasInP,
  // With a bias in P tiles that the bounds cut are computed one by one. With splits there are no registers for that.
  kMaskedTilesApart = kBiasInP && !kSplitTail && (kHasLeft || kHasRight),
  kVStepBytes = ElementV::kStep * (kCentersV ? kValueDim : +kPanelRowBytes),  // of V in a step of a product
  kBiasPanels = bias_panels(kBiasTile, kBlockKeys),
  kBiasWords = kBiasInRegisters ? kBlockKeys / 4 : 0,  // of a thread
  kMaskWords = kMaskBits ? mask_words(kBlockKeys) : 0,  // of a thread and a key tile
  kMaskTileBytes = kMaskWords * kMaskThreads * 4,       // of a strip
  // Bounds of the call that a mask of bits does not have: it hides only the keys after the last one.
  kBoundsApart = kHasLeft || kHasRight || kHasChunk || kSeqUsedK,
  // The map of a mask of bits says which tiles a block sees. That of mask_mod says it of each strip, and consumers skip
  // those that their own does not see.
  kMapStrips = kMaskBits ? kConsumers : 1,
  kSkipsTiles = kMapsTiles && !kMaskBits && kConsumers > 1,
  kMaxSortedBlocks = max_sorted_blocks(kConsumers),
  kBiasTiles = kBiasRows ? kConsumers : 1,
  kBiasBoxBytes = kBiasRows ? kStripPanelBytes : kPanelRowBytes,
};

static_assert(!kMapsTiles || !(kCentersV || kDoubleBuffersP));  // these count tiles
static_assert(!kBiasInRegisters || !(kPacked || kSeqUsedQ || kDropout));
static_assert(!kPairs || (kKStages == kVStages && (!kBias || kBiasInP) && !kMapsTiles));
static_assert(kPairs || !kBiasInP);

enum NamedBarrier : u32 {
  kBarrierConsumer = 1,  // one per consumer warpgroup
  kBarrierAllConsumers = kBarrierConsumer + kConsumers,
};
