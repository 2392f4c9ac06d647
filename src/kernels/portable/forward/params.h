// Arguments of the portable forward kernel (portable/forward/forward.cu), the same for the host and the device.
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zeros in shared memory
//   kValueDim       dv rounded up to 16 (<= 256)
//   kWholeColumns   1: d and dv are kHeadDim and kValueDim
//   kStrips         strips of 64 rows of Q that a CTA has: Br = 64 * kStrips
//   kWarpStrips     strips that four warps share, of which each warp has 16 rows: 1, or 2, so that what a warp loads of
//                   K and V serves twice as many rows
//   kBlockKeys      Bc, a multiple of 16
//   kStages         buffers of K and V, 1 or 2
//   kQInRegisters   1: Q stays in registers, and K and V take its shared memory; needs two stages
//   kQKept          steps of 16 columns of Q that stay in registers besides; 0 with kQInRegisters
//   kResidents      CTAs that an SM has room for
//   kStore          how O leaves: kStoreRows, 16 bytes at a time, or kStoreElements, where rows of O are not multiples
//                   of 16 bytes, strides and base included
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kTree, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kHasSinks,
//   kPacked, kPackedK, kPage, kPageLists, kBatchIdx, kLeftPad, kSeqUsedQ, kSeqUsedK, kDropout, kHasLse, kFewQueries
//                   as in sm90/forward/params.h and decode/params.h
//
// A launch is a CTA of 128 * kStrips / kWarpStrips threads for each q tile (host_device/work_tiles.h).
#pragma once
#include "host_device/attention_params.h"

struct PortableForwardParams : AttentionParams {};
