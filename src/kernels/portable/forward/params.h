// Arguments of the portable forward kernel (portable/forward/forward.cu), the same for the host and the device.
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zeros in shared memory
//   kValueDim       dv rounded up to 16 (<= 256)
//   kWholeColumns   1: d = kHeadDim and dv = kValueDim
//   kStrips         strips of 64 rows of Q that a CTA has: Br = 64 * kStrips
//   kWarpStrips     strips of four warps, each of which has 16 rows of every strip: 1 or 2. With 2 a warp uses the K
//                   and V that it loads from shared memory for twice as many rows
//   kBlockKeys      Bc, a multiple of 16
//   kStages         buffers of K and V, 1 or 2
//   kQInRegisters   1: Q stays in registers, and K and V use its shared memory; needs two stages
//   kQKept          steps of 16 columns of Q that are kept in registers, too; 0 with kQInRegisters
//   kResidents      CTAs that fit an SM
//   kStore          how O is stored: kStoreRows, by 16 bytes, or kStoreElements, if rows, strides or the address of O
//                   are not multiples of 16 bytes
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kTree, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kHasSinks,
//   kPacked, kPackedK, kPage, kPageLists, kBatchIdx, kLeftPad, kSeqUsedQ, kSeqUsedK, kDropout, kHasLse, kFewQueries
//                   as in sm90/forward/params.h and decode/params.h
//
// A launch has a CTA of 128 * kStrips / kWarpStrips threads for each q tile (host_device/work_tiles.h).
#pragma once
#include "host_device/attention_params.h"

struct PortableForwardParams : AttentionParams {};
