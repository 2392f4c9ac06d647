// Sizes and the layout of shared memory of the portable backward kernel of wide heads
// (portable/wide_backward/gradient.cu).
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h), of 16 bits
//   kHeadDim        d rounded up to 16 (<= 576); columns beyond d are zeros in shared memory
//   kValueDim       dv rounded up to 16 (<= 512)
//   kWholeColumns   1: d = kHeadDim and dv = kValueDim
//   kGradient       a WideGradient: dQ, dK or dV
//   kBlockRows      rows of Q of a score tile: of dQ those of a CTA, else those of a step; 32 or 64
//   kBlockKeys      keys of a score tile: of dK and dV those of a CTA, else those of a step; 32 or 64
//   kWarps          warps of a CTA: 4 or 8
//   kChunkPanels    panels of a chunk: 2 or 4
//   kStages         buffers of the ring of chunks, 2 at least
//   kDqMethod       a DqMethod: kByRows or kNone
//   kStoresMatrices 1: P and dS are stored by stmatrix, if the target has it
//   kSplits         1: several CTAs share the q heads of a key block, and portable/backward/reduce.cu adds their dK and
//                   dV
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kPacked,
//   kSeqUsedQ, kSeqUsedK, kDropout
//                   as in sm90/forward/params.h
//   kElements, kF32KeyGradients    as in backward/params.h
//
// A launch has a CTA of 32 * kWarps threads for each row block of a q head or for each key block or split of a key
// block.
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

// The gradient that a kernel computes.
enum class WideGradient : int { kOfQ, kOfK, kOfV };

// The constants of kernel_config.h that the layout depends on.
struct WideBackwardTile {
  WideGradient gradient;
  int head_dim, value_dim, block_rows, block_keys, chunk_panels, stages;
};

// Byte offsets. Tiles are panels of rows of 128 bytes, swizzled.
struct WideBackwardLayout {
  int values;             // the CTA's rows of dO, or its keys of V, after those of Q or K; none for dV
  int weights;            // P or dS: a row of 128 bytes of queries for each key
  int exchanged;          // halves of S and dP, in f32
  int ring, chunk_bytes;  // buffers of chunks
  int statistics;         // shift and delta of the rows of a step, twice
  int dropout_key;
  int bytes;
};

FULGUR_SHARED WideBackwardLayout wide_backward_layout(const WideBackwardTile& tile) {
  const bool of_rows = tile.gradient == WideGradient::kOfQ;
  const int own = of_rows ? tile.block_rows : tile.block_keys;
  const int streamed = of_rows ? tile.block_keys : tile.block_rows;
  const auto own_bytes = [&](int dim) { return (dim + 63) / 64 * own * kPanelRowBytes; };
  WideBackwardLayout map = {};
  map.values = own_bytes(tile.head_dim);
  map.weights = map.values + (tile.gradient == WideGradient::kOfV ? 0 : own_bytes(tile.value_dim));
  map.exchanged = map.weights + tile.block_keys * kPanelRowBytes;
  map.ring = map.exchanged + tile.block_rows * tile.block_keys * int(sizeof(float));
  map.chunk_bytes = tile.chunk_panels * streamed * kPanelRowBytes;
  map.statistics = map.ring + tile.stages * map.chunk_bytes;
  map.dropout_key = map.statistics + 2 * 2 * tile.block_rows * int(sizeof(float));
  map.bytes = map.dropout_key + 8;
  return map;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif
