// Arguments of the Hopper forward kernel (sm90/forward/forward.cu), the same for the host and the device. Plain C++
// types only: neither side needs a toolkit header.
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//                   kElementV of e4m3: P is, too, and V comes as an image (sm90/forward/values.cu)
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zero-filled by the tensor maps
//   kValueDim       dv rounded up to 16 (<= 256)
//   kConsumers      consumer warpgroups, a strip of 64 rows of Q each: Br = 64 * kConsumers
//   kBlockKeys      Bc, a multiple of 16, <= 256
//   kQStages        buffers of Q (1 or 2); with kStoreTiles TMA stores O from the buffer of its Q
//   kKStages        buffers of K
//   kVStages        buffers of V
//   kPairs          1: K of a key tile and V of the one before come together (sm90/forward/rings.cuh)
//   kMeanProducts   1: means of V are added by products, too (sm90/forward/values.cuh): kPairs, and no kHasLeft
//   kProducerRegisters, kConsumerRegisters    registers a thread after setmaxnreg (multiples of 8):
//                   1 consumer 40/208, 2 consumers 40/232, 3 consumers 32/160, 4 consumers 32/112
//   kHasLeft        1: window_left bounds the keys
//   kHasRight       1: window_right does (causal: window_right = 0)
//   kHasChunk       1: a row sees its chunk's keys alone; needs both bounds
//   kTopLeft        1: the first row is on the diagonal of the first key, not the last one on that of the last
//   kPart           1: the call is a part of a larger one, whose diagonals and random numbers it has
//   kTree           0; 1 where a tree mask hides some of the last keys (decode/params.h)
//   kScoreMode      0: scores are scale * q.k, scale > 0, folded into the exponent
//                   1: scores are transformed first (scale <= 0, softcap, ALiBi)
//   kSoftcap        1: softcap * tanh(score / softcap); needs kScoreMode 1
//   kAlibi          1: ALiBi bias; needs kScoreMode 1
//   kBias           1 + the element type of a dense bias; 0: there is none
//   kBiasRows       1: each query has a row of it; 0: all have the same
//                   three consumers have a bias of 16 bits in registers: not packed, no kSeqUsedQ, no kDropout
//   kBiasTerms      1 or 2: products add the bias, which has kBias of bf16 (attention/bias_products.cuh); 0: they do not
//   kMaskBits       1: it is a bool mask that comes as bits (attention/mask_bits.cuh), with a map of its tiles
//   kHasSinks       1: sinks[head] joins the softmax of a row (attention/sinks.cuh)
//   kPacked         1: packed variable length, cu_seqlens_q
//   kPackedK        1: k and v, too, cu_seqlens_k
//   kPage           keys of a page; 0: k and v have no pages
//   kPageLists      1: the pages of all sequences are one list; 0: a row of a table each
//   kBatchIdx, kLeftPad    0; 1 where cache_batch_idx, leftpad_k say where keys lie (decode/params.h)
//   kBoxKeys        keys of a box of a key tile: of one page
//   kSeqUsedQ       1: seqused_q[batch] bounds the queries
//   kSeqUsedK       1: seqused_k[batch] bounds the keys
//   kDropout        1: dropout of P
//   kHasLse         1: write LSE
//   kStore          how O is stored. kStoreTiles: by TMA. kStoreRows: from registers, 16 bytes at a time, where
//                   there is one buffer of Q, which is wanted back. kStoreElements: from registers by elements, where
//                   rows of O are not multiples of 16 bytes, strides and base included: TMA cannot address those
//                   strides, and writes multiples of 16 bytes
//   kFewQueries     sequences of up to so many queries are a decode kernel's
//   kSharesBlocks   1: the heads of a group share blocks of rows (host_device/strips.h), of which host_device/
//                   work_tiles.h then counts one head
//   kSplitTail      1: some blocks are cut into splits (host_device/work_tiles.h)
//   kEarlyStarts    1: starts while the kernel runs that prepares V, or the last one that makes the map of tiles
//                   (device/dependent_launch.cuh)
//
// cuda/sm90/forward_plan.cpp lists the tiles that compile without spills, and cuda/jit/compile.cpp the compiler's
// options. A launch is as many CTAs as the SMs hold, or as there are q tiles, of 128 * (kConsumers + 1) threads;
// sm90/forward_layout says how much shared memory each has.
#pragma once
#include "host_device/attention_params.h"
#include "host_device/tensor_map.h"

// As host_device/tensor_map.h says.
struct TensorMaps {
  TensorMapBlob q_map;  // dims {d,  sq, hq, b}   box {a panel's columns, 64, 1, 1}
  TensorMapBlob k_map;  // dims {d,  sk, hk, b}   box {a panel's columns, kBoxKeys, 1, 1}; pages: {d, kPage, hk, pages}
  TensorMapBlob v_map;  // dims {dv, sk, hk, b}   box {a panel's columns, kBoxKeys, 1, 1}; the same
  TensorMapBlob o_map;  // dims {dv, sq, hq, b}   box {a panel's columns, 16, 1, 1}; unused unless kStoreTiles
  TensorMapBlob bias_map;  // dims {sk, sq, hq, b} or 1  box {a panel's columns, 64 or 1, 1, 1}; unused unless kBias
};

// The shift and the sum of exponentials of a row over some of its keys, as in attention/softmax.cuh.
struct RowSum {
  float shift, sum;
};

// V for products of e4m3, as sm90/forward/values.cu prepares it.
struct CenteredValues {
  unsigned char* image;         // [kv head and sequence][tiles]: key tiles as they lie in shared memory
  int batch_tiles, head_tiles;  // from a sequence to the next (0 where they are packed), from a kv head to the next
  int segments;                 // of a sequence at most
  float* means;                 // [b, hk, segments, kValueDim]
  unsigned char* mean_steps;    // [b, hk, four segments]: the same as steps of a product
  RowSum* sums;                 // [CTAs, rows of a q tile, segments]
};

struct ProductValues {
  CenteredValues values;  // kElementV of e4m3
};

// The arguments of expressions come last; most kernels have none.
struct ForwardParams : TensorMaps, ProductValues, AttentionParams {};
