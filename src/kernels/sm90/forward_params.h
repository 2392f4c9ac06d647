// Arguments of the Hopper forward kernel (sm90/forward.cu), shared verbatim by the host and the device text.
// Plain C types only: neither side needs a toolkit header.
//
// plan.h, generated per plan, holds one `#define` and one anonymous enum of ints:
//   #define FULGUR_INPUT "bf16"     PTX type of Q K V O: "bf16" or "f16"
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zero-filled by the tensor maps
//   kValueDim       dv rounded up to 16 (<= 256)
//   kConsumers      consumer warpgroups, 64 rows of Q each: Br = 64 * kConsumers
//   kBlockKeys      Bc, a multiple of 16, <= 256
//   kQStages        buffers of Q (1 or 2); O leaves through the same buffer with kStoreTiles
//   kKStages        buffers of K        kVStages   buffers of V
//   kProducerRegisters, kConsumerRegisters    registers a thread after setmaxnreg (multiples of 8):
//                   2 consumers 40/232, 3 consumers 32/160, 4 consumers 32/112
//   kHasLeft        1: window_left bounds the keys      kHasRight  1: window_right does (causal: window_right = 0)
//   kScoreMode      0: scores are scale * q.k, scale > 0, folded into the exponent
//                   1: scores are transformed first (scale <= 0, softcap, ALiBi)
//   kSoftcap        1: softcap * tanh(score / softcap)  kAlibi     1: ALiBi bias    (both need kScoreMode 1)
//   kPacked         1: packed variable length, cu_seqlens_q and cu_seqlens_k
//   kSeqUsedK       1: seqused_k[batch] bounds the keys
//   kHasLse         1: write LSE
//   kStore          how O leaves. kStoreTiles: by the copy engine. kStoreRows: from registers, 16 bytes at a time, where there is one buffer of
//                   Q, which is wanted back. kStoreElements: from registers by elements, where rows of O are not multiples of 16 bytes,
//                   strides and base included: the copy engine cannot address those strides, and writes multiples of 16 bytes
//   kSplitTail      1: items from first_split_tile on are split over keys (see below)
//
// The tiles that compile without spills are in cuda/hopper_forward_plan.cpp.
//
// Embedded text: sm90/forward.cu includes plan.h, sm90/forward_{layout,schedule,softmax,output}.cuh, sm90/forward_params.h and
// shared/{mbarrier,misc,tma,wgmma}.cuh by these names. NVRTC: --gpu-architecture=sm_90a --std=c++20 --modify-stack-limit=false -default-device.
// Entry: extern "C" fulgur_forward(const __grid_constant__ ForwardParams).
//
// Launch: grid = min(multiprocessors, items) blocks, block = 128 * (kConsumers + 1) threads, dynamic shared memory =
//   kQStages * kConsumers * 64 * 128 * max(dp, vp)  +  kBlockKeys * 128 * (kKStages * dp + kVStages * vp)  +  1024 bytes,
//   where dp = ceil(kHeadDim / 64) and vp = ceil(kValueDim / 64); at most 232448.
#pragma once

// A CUtensorMap: filled by cuTensorMapEncodeTiled, opaque here.
struct alignas(64) TensorMapBlob {
  unsigned long long words[16];
};

// A tensor [batch, row, head, dim]; strides in elements, of any sign. Packed: no batch stride.
struct StridedTensor {
  unsigned short* data;
  long long batch, row, head;
};

struct ForwardParams {
  // Tensor maps: 16-bit elements, rank 4, dims innermost first {dim, seqlen, heads, batch}, element strides 1, interleave none, swizzle 128B,
  // L2 promotion 256B, out-of-bounds fill zero. Byte strides are those of seqlen, heads and batch (multiples of 16; the base too).
  // Packed: seqlen extent = total rows, batch extent = 1. Extents are the true d / dv (not rounded) and the true seqlen.
  TensorMapBlob q_map;  // dims {d,  sq, hq, b}   box {64, 64, 1, 1}
  TensorMapBlob k_map;  // dims {d,  sk, hk, b}   box {64, kBlockKeys, 1, 1}
  TensorMapBlob v_map;  // dims {dv, sk, hk, b}   box {64, kBlockKeys, 1, 1}
  TensorMapBlob o_map;  // dims {dv, sq, hq, b}   box {64, 16, 1, 1}; unused unless kStoreTiles

  StridedTensor q, k, v;      // the tensors of the maps, for rows that are computed again (forward_repair.cuh)
  StridedTensor o;            // for O that leaves from registers
  float* lse;                 // [b, hq, sq] or packed [hq, total_q]; natural logarithm
  long long lse_batch_stride; // elements (0 when packed)
  long long lse_head_stride;  // elements

  const int* cu_seqlens_q;    // [b + 1], packed
  const int* cu_seqlens_k;    // [b + 1], packed
  const int* seqused_k;       // [b], kSeqUsedK
  const float* alibi_slopes;  // [hq] or [b, hq], kAlibi
  int alibi_batch_stride;     // 0 or hq

  int sq, sk;                 // not packed: the lengths
  int d, dv;                  // true widths
  int hq;
  int group;                  // hq / hk
  int window_left, window_right;  // >= 0 where kHasLeft / kHasRight
  float scale_log2;           // scale * log2(e)
  float softcap_scale;        // kSoftcap: 2 * log2(e) * scale / softcap
  float softcap_log2;         // kSoftcap: softcap * log2(e)

  // Scheduling. A tile is Br rows of one (batch, head). Tiles are numbered by sections of consecutive heads (batch-major: batch * hq + head);
  // inside a section row blocks are outermost, the last first, and heads innermost. A block takes item blockIdx.x first, then
  // grid + atomicAdd(counters, 1).
  int row_tiles;              // ceil(longest sq / Br)
  int heads;                  // b * hq
  int section_heads;          // heads a section: those of a kv head. Its row blocks are worked on together, so that K and V come to L2 once,
                              // little by little, beside the copies of the sections before
  int bulk_heads;             // heads in such sections; all others are the last section, which is long enough to leave the multiprocessors
                              // with short tiles at the end
  int items;                  // tiles, or with kSplitTail first_split_tile + (tiles - first_split_tile) * split_parts
  int* counters;              // [2] zero before the first launch; every launch leaves them zero. One launch at a time may use them.

  // kSplitTail (full masks): the last tiles, too few to fill the multiprocessors, are cut into split_parts runs of keys; each part leaves its O
  // and its row statistics in `partial`, and the part that finishes last combines them in order and writes O and LSE.
  int first_split_tile;
  int split_parts;            // <= 8
  float* partial;             // [split tiles][kConsumers][split_parts][kValueDim / 2 + 4][128] floats
  int* tickets;               // [split tiles][kConsumers], zero before the first launch, left zero
};
