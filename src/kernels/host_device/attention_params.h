// Arguments of attention kernels, the same for the host and the device.
#pragma once
#include "host_device/element.h"
#include "host_device/expression.h"
#include "host_device/work_tiles.h"

// A tensor [batch, row, head, dim]; strides in elements, of any sign. A packed tensor has no batch stride.
struct StridedTensor {
  void* data;
  long long batch, row, head;
};

// The pages of keys: K and V are tensors [page, row, head, dim].
struct KeyPages {
  int entries;  // number of pages
  int ids;      // ids of a sequence in the table, or of all lists
  long long table_stride;  // from the ids of a sequence to those of the next, without indptr
  long long id_stride;     // from an id to the next
  const int* table;   // [b, ids], or [ids]: the lists of all sequences
  const int* indptr;  // [b + 1], kPageLists: the first id of each sequence
};

// The sinks [hq], kHasSinks.
struct Sinks {
  const void* data;
  fulgur::kernels::Element type;
};

// Descales of codes [b, hk], f32 or f16; strides in elements, 0 where all have the same. null: they are 1.
struct Descale {
  const void* data;
  fulgur::kernels::Element type;
  long long batch, head;
};

// A dense bias [b, hq, sq, sk], kBias; strides in elements, 0 where all have the same.
struct DenseBias {
  const void* data;
  long long batch, head, row, key;
};

// The origin of a part in a larger call: the shift of diagonals (Band::shift) and, for random numbers, the heads of a
// sequence, and the first head (over all sequences), query and key.
struct CallPart {
  int shift, heads, head, query, key;
};

// The call: inputs, lengths, mask and scores.
struct CallParams {
  StridedTensor q, k, v;       // for rows that are recomputed (attention/repair.cuh)

  const int* cu_seqlens_q;     // [b + 1], packed
  const int* cu_seqlens_k;     // [b + 1], packed
  const int* seqused_k;        // [b], kSeqUsedK
  const float* alibi_slopes;   // [hq] or [b, hq], kAlibi
  long long alibi_batch_stride;  // elements (0 for [hq])

  int sq, sk;                  // the lengths; packed: of the longest sequences
  int d, dv;                   // not rounded
  int hq;
  int group;                   // hq / hk
  int window_left;             // >= 0 where kHasLeft
  int window_right;            // >= 0 where kHasRight
  float scale_log2;            // scale * log2(e)
  float softcap_scale;         // kSoftcap: 2 * log2(e) * scale / softcap, finite
  float softcap_log2;          // kSoftcap: softcap * log2(e)
  float softcap_small;         // kSoftcap: scale * log2(e) * kTanhSquare (host_device/score.h)

  int total_q, total_k;  // rows of all packed sequences of q and k

  // kDropout
  const unsigned long long* rng_state;  // seed and offset; null: they are dropout_seed and dropout_offset
  unsigned long long dropout_seed, dropout_offset;
  unsigned dropout_threshold;  // dropout_threshold() of host_device/dropout.h
  float keep_scale;            // 1 / (1 - p)

  alignas(16) int chunk;  // > 0 where kHasChunk; aligned, so that the alignment of later members does not depend on it
  CallPart part;          // kPart
  const int* seqused_q;   // [b], kSeqUsedQ
  DenseBias bias;
  float bias_factor;  // kScoreMode 0: 1 / scale
};

// Arguments of every forward kernel.
struct AttentionParams : CallParams {
  StridedTensor o;             // for O that is stored from registers
  float* lse;                  // [b, hq, sq] or packed [hq, total_q]; natural logarithm
  long long lse_batch_stride;  // elements (0 when packed)
  long long lse_head_stride;   // elements

  fulgur::kernels::Work work;
  // [kSchedulerCounters], zero before the first launch; every launch leaves them zero. One launch at a time uses them.
  int* counters;
  float* partial;  // [split blocks][splits][strips][partial_floats(kValueDim)], kSplitTail
  int* tickets;    // [split blocks][strips], zero before the first launch, left zero, kSplitTail
  KeyPages pages;  // kPage; without pages its entries are sequences of K and V
  Sinks sinks;
  const int* cache_batch_idx;           // [b], kBatchIdx
  const int* leftpad_k;                 // [b], kLeftPad
  const unsigned long long* tree_mask;  // [b, sq], packed [total_q], kTree: bit j is that of key sk - sq + j
  Descale q_descale, k_descale, v_descale;  // descales of e4m3
  [[no_unique_address]] fulgur::kernels::ExpressionArguments expression;
};
