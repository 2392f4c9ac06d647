// Arguments of the decode kernels, the same for the host and the device.
//
// kernel_config.h, generated per plan, holds a macro and one anonymous enum of ints:
//   #define FULGUR_SCHEDULE StreamK     the type of the schedule (decode/schedule/schedule.cuh)
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//   kStoredQ, kStoredK, kStoredV  those of q, k and v in memory; k and v may have codes, q then has f16, bf16 or,
//                   if both have codes, e4m3 or e5m2
//   kKScales, kVScales  scales of a key, one for each group of columns; 0: all keys of a sequence and kv head have one
//                   scale
//   kKZeroPoint, kVZeroPoint  1: codes have zero points, as many as scales
//   kKScaleType, kVScaleType, kKZeroPointType, kVZeroPointType  element types of these numbers, f32 or f16
//   kKPiece, kVPiece  how rows of blocks are copied (decode/layout.h): by pieces of 4, 8 or 16 bytes, 2 or kMiddle; 0:
//                   there are no blocks
//   kHeadDim        d rounded up to 16; columns beyond d are zeros
//   kValueDim       dv rounded up to 16; both to 32 with codes of 4 bits; with kColumnGroups to 128
//   kHeads          kv heads that a CTA reads together, each by a warp of a warp group. They count as one in hk, and
//                   kGroup has the q heads of all of them
//   kWarpsPerGroup  warps of a warp group, 16 rows each: Br = 16 * kWarpsPerGroup. Four or eight are warpgroups, except
//                   with kHeads and on the wide path
//   kColumnShares   the wide path: warps that share rows, each with some columns of O; else 1
//   kWarpStrips     the wide path: times 16 rows that these have, so that Br is
//                   16 * kWarpStrips * kWarpsPerGroup / kColumnShares; else 1
//   kChunkBytes     the wide path: bytes of a chunk of K or V; else 0
//   kWarpGroups     warp groups of a CTA, each with tiles of its own
//   kBlockKeys      Bc, the keys of a tile
//   kKStages, kVStages  buffers of a warp group, of kBlockKeys rows of K, of V each
//   kCodeStages     buffers of a warp group, of the codes of kBlockKeys keys, on the warpgroup path; else 0
//   kConvertWarps   warps of a CTA that convert these; else 0
//   kColumnGroups   warpgroups that share the rows and keys of a tile, each with a part of O's columns
//                   (wide/decode_wide_warpgroup.cu); else 1
//   kBoxKeys        keys of a page that TMA loads at once, on the warpgroup path and of codes; 0: lanes copy rows
//   kResidents      CTAs of an SM
//   kTileRows       rows of a block that a kv head may have: 4 or 8 where Br is 16, else Br; of all of kHeads
//   kCombineEights  times eight columns that a warp of decode/combine.cu takes (Schedule::kFragments)
//   kRowBlocks      all blocks of rows of a kv head, which as many CTAs compute at the same time over the same keys; 1:
//                   each block of rows is a q block of its own
//   kGroup          hq / hk, of all of kHeads
//   kQWhole, kOWhole  1: rows of q, of o are multiples of 16 bytes, strides and base included
//   kWholeColumns   1: d and dv are kHeadDim and kValueDim
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kScoreMod,
//                   kMaskMod, kHasSinks, kHasLse
//                   as in sm90/forward/params.h
//   kPacked         1: q is packed, cu_seqlens_q
//   kPackedK        1: k and v are packed, cu_seqlens_k
//   kSeqUsedQ       1: seqused_q[batch] bounds the queries
//   kSeqUsedK       1: seqused_k[batch] bounds the keys
//   kPage           keys of a page; 0: k and v have rows of a batch
//   kPageLists      1: page_indptr says where the pages of a sequence begin, else table_stride does
//   kBatchIdx       1: cache_batch_idx names the row of the batch
//   kLeftPad        1: leftpad_k says which key is the first
//   kTree           1: tree_mask says which of the last sq keys a query sees
//   kFewQueries     the maximum of queries in a sequence that it computes, where sm90/forward/forward.cu computes the
//                   other sequences; 0: it computes all
//   kAppends        1: it appends new rows of K and V, and attends them, too
//   kRotatesQ       1: it rotates q with the new keys
//   kUnreadRows     1: there may be new rows that no work tile reads
#pragma once
#include "common/append_params.h"
#include "host_device/attention_params.h"
#include "host_device/stream_k.h"
#include "host_device/tensor_map.h"

// As host_device/tensor_map.h says, but for L2 promotion 128B; kBoxKeys.
struct DecodeMaps {
  TensorMapBlob k_map;  // dims {d,  sk, hk, b}   box {64, kBoxKeys, 1, 1}; pages: {d, kPage, hk, pages}
  TensorMapBlob v_map;  // dims {dv, sk, hk, b}   box {64, kBoxKeys, 1, 1}; the same
                        // codes: columns are bytes, or pairs of bytes of blocks (CodeLoader::copy_box)
};

// How many bytes of a key's scales, which lie side by side, are copied at once; 0: they are no multiple of a word.
FULGUR_SHARED int scale_piece(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 0; }

// Scales of codes, or their zero points, of f32 or f16. `data` is null where all scales are 1.
struct CodeScales {
  const void* data;
  fulgur::kernels::Element type;
  bool of_rows;  // each row of Q, K or V has its own; else each sequence and kv head does
  bool runs;     // the scales of a key lie side by side, at a multiple of scale_piece(their bytes)
  long long batch, row, head, group;  // strides in bytes
};

struct DecodeParams : DecodeMaps, CallParams {
  StridedTensor o;
  float* lse;                  // as in AttentionParams
  long long lse_batch_stride, lse_head_stride;

  int batch, hk;
  KeyPages pages;              // kPage; its entries without pages: rows of the batch
  const int* cache_batch_idx;  // [b], kBatchIdx
  const int* leftpad_k;        // [b], kLeftPad

  // Partial results of splits, as Schedule::partial_of says. StreamK, StreamKOrRoundRobin, Dynamic:
  // [kRowBlocks][2 * CTAs][kTileRows][partial_row_floats(kValueDim)]; SplitToFill: [kRowBlocks][CTAs][split_floats], of
  // the CTAs of a block; InvariantSplits: [b][hk][max_splits][split_floats], kPackedK:
  // [hk][total_k / kPackedSplitKeys][split_floats].
  float* partial;
  int* tickets;    // [4 * CTAs of all blocks + 1], zero before the first launch; every launch leaves them zero

  Sinks sinks;     // kHasSinks
  const unsigned long long* tree_mask;  // [b, sq], packed [total_q], kTree: bit j is that of key sk - sq + j
  int max_splits, split_floats;  // SplitToFill, InvariantSplits: of a q block; floats of a partial result
  fulgur::kernels::Divisor to_fill, to_fit, heads;  // SplitToFill: CTAs, and these less the q blocks; hk
  CodeScales k_scale, v_scale, k_zero_point, v_zero_point, q_scale;  // of codes; strides of k and v then count bytes
  int v_in_k;  // kColumnGroups: V is the first dv columns of K, whose tiles are those of V, too
  [[no_unique_address]] fulgur::kernels::ExpressionArguments expression;
};

struct AppendedRows {
  AppendParams append;
};

// kAppends: q is where rotated queries go, and seqused_k is not read. What expressions need comes last.
struct DecodeAppendParams : AppendedRows, DecodeParams {};
