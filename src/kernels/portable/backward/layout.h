// Sizes and the layout of shared memory of the portable backward kernel by keys (portable/backward/keys.cu).
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zeros in shared memory
//   kValueDim       dv rounded up to 16 (<= 256)
//   kWholeColumns   1: d = kHeadDim and dv = kValueDim
//   kBlockRows      Br: rows of Q of a step, 32 or 64
//   kBlockKeys      Bc: keys of a CTA
//   kWarps          warps of a CTA
//   kRoles          2: half of the warps compute P and dV, the others dS and dK; 1: each warp computes all
//   kStages         buffers of Q and dO
//   kDsStages       buffers of P and dS
//   kDqMethod       a DqMethod: kAtomic, kOrdered or kNone
//   kDqParts        1: semaphores of a row tile
//   kDqByFours      1: four sums of dQ are added by one instruction, if the target has it (red.v4)
//   kStoresMatrices 1: P and dS are stored by stmatrix, if the target has it
//   kEarlyStarts, kRoundsDq    0
//   kWholeHeads     1: a CTA computes all key blocks of a kv head, one after the other
//   kSplits         1: several CTAs share the q heads of a key block, and reduce.cu adds their dK and dV
//   kDkFirst        1: with two roles dK of a step is computed before its dQ
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kPacked,
//   kSeqUsedQ, kSeqUsedK, kDropout
//                   as in sm90/forward/params.h
//   kHasDlse, kElements, kKeyGradients    as in backward/params.h
//
// A launch has a CTA of 32 * kWarps threads for each key block, each split of a key block, or each kv head.
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

// The constants of kernel_config.h that the layout depends on.
struct PortableBackwardTile {
  Operands types;
  int head_dim, value_dim, block_rows, block_keys, stages, ds_stages;
};

// Byte offsets. Tiles are panels of rows of 128 bytes, swizzled.
struct PortableBackwardLayout {
  int k, v;
  int stages, stage_bytes;  // stages of Q and dO: the first offset, and bytes of each
  int dout;                 // offset of dO in a stage
  int weights;              // P and dS: a row of 128 bytes of queries for each key
  int weights_bytes;        // bytes of a buffer of both
  int statistics;           // for each stage shift and delta of its rows
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
  map.weights_bytes = 2 * tile.block_rows * bytes_of(tile.types.o) * tile.block_keys;
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
