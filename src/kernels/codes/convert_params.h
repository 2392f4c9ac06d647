// Arguments of convert.cu, the same for the host and the device. Values of lengths and tables have not been checked.
#pragma once
#include "common/append_params.h"
#include "host_device/attention_params.h"

namespace fulgur::kernels {
// Threads of a CTA, the columns that a thread converts at a time, and the rows that it has in flight.
constexpr int kConvertThreads = 256, kConvertColumns = 8, kConvertRows = 4;

FULGUR_SHARED int convert_chunks(int dim) { return (dim + kConvertColumns - 1) / kConvertColumns; }
// The rows of so many chunks that a CTA converts at a time.
FULGUR_SHARED int convert_rows(int chunks) {
  return kConvertRows * (chunks < kConvertThreads ? kConvertThreads / chunks : 1);
}
}  // namespace fulgur::kernels

// K or V.
struct ConvertedTensor {
  StridedTensor from;  // strides in bytes
  void* to;            // sequences or packed rows in the order of the call; contiguous, heads of whole chunks
  int heads, dim;
  AppendCodes codes;   // the scales that numbers take; groups 0: none
};

struct ConvertParams {
  ConvertedTensor k, v;
  int batch, sk, total_k;               // as CallParams has them
  const int *cu_seqlens_k, *seqused_k;  // or null
  const int *cache_batch_idx, *leftpad_k;  // or null
  KeyPages pages;  // table is null without pages, indptr without lists
  int page;        // keys of a page
  int* lengths;    // [b]: receives the lengths of K
  int* starts;     // [b + 1]: receives the first rows of sequences of K; or null
  int ctas;        // that convert a sequence
};
