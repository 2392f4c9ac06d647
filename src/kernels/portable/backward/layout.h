// Sizes and the map of shared memory of the portable backward kernel by keys (portable/backward/keys.cu).
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zeros in shared memory
//   kValueDim       dv rounded up to 16 (<= 256)
//   kWholeColumns   1: d and dv are kHeadDim and kValueDim
//   kBlockRows      Br: rows of Q of a step, 32 or 64
//   kBlockKeys      Bc: keys of a CTA
//   kWarps          of a CTA
//   kRoles          2: half of the warps compute P and dV, half dS and dK; 1: each computes all
//   kStages         buffers of Q and dO
//   kDsStages       buffers of P and dS
//   kDqMethod       a DqMethod: kAtomic, kOrdered or kNone
//   kDqParts        1: semaphores of a row tile
//   kDqByFours      1: four sums of dQ are added at once, where the target can (red.v4)
//   kStoresMatrices 1: P and dS are stored by matrices, where the target can (stmatrix)
//   kEarlyStarts, kRoundsDq    0
//   kWholeHeads     1: a CTA has all key blocks of a kv head, one after another
//   kSplits         1: several CTAs share the q heads of a key block, and reduce.cu adds their dK and dV
//   kDkFirst        1: with two roles dK of a step comes before its dQ
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kPacked,
//   kSeqUsedQ, kSeqUsedK, kDropout
//                   as in sm90/forward/params.h
//   kHasDlse, kElements, kKeyGradients    as in backward/params.h
//
// A launch is a CTA of 32 * kWarps threads for each key block, or for each split of it or kv head.
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

// What the map depends on: constants of kernel_config.h.
struct PortableBackwardTile {
  Operands types;
  int head_dim, value_dim, block_rows, block_keys, stages, ds_stages;
};

// Byte offsets. Tiles are panels of rows of 128 bytes, swizzled.
struct PortableBackwardLayout {
  int k, v;
  int stages, stage_bytes;  // where they begin: Q and dO after each other
  int dout;                 // in a stage
  int weights;              // P and dS: a row of 128 bytes for each key, with its queries
  int weights_bytes;        // of one buffer of both
  int statistics;           // of each stage: shift and delta of its rows
  int dropout_key, number;
  int bytes;
};

FULGUR_SHARED PortableBackwardLayout portable_backward_layout(const PortableBackwardTile& tile) {
  const auto tile_bytes = [](Element type, int dim, int rows) { return panels_of(type, dim) * rows * kPanelRowBytes; };
  PortableBackwardLayout map = {};
  map.v = tile_bytes(tile.types.k, tile.head_dim, tile.block_keys);
  map.stages = map.v + tile_bytes(tile.types.v, tile.value_dim, tile.block_keys);
  map.dout = tile_bytes(tile.types.q, tile.head_dim, tile.block_rows);
  map.stage_bytes = map.dout + tile_bytes(tile.types.o, tile.value_dim, tile.block_rows);
  map.weights = map.stages + tile.stages * map.stage_bytes;
  map.weights_bytes = 2 * tile.block_rows * 2 * tile.block_keys;
  map.statistics = map.weights + tile.ds_stages * map.weights_bytes;
  map.dropout_key = map.statistics + tile.stages * 2 * tile.block_rows * int(sizeof(float));
  map.number = map.dropout_key + 8;
  map.bytes = map.number + 8;
  return map;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif
