// Arguments of common/padding.cu, the same for the host and the device.
#pragma once

struct ForwardPaddingParams {
  void* o;                    // [batch, sq, hq, dv] or packed [total_q, hq, dv]
  long long o_batch_stride;   // elements (0 when packed)
  long long o_row_stride;     // elements
  long long o_head_stride;    // elements
  float* lse;                 // [batch, hq, sq] or packed [hq, total_q], or null
  long long lse_batch_stride; // elements (0 when packed)
  long long lse_head_stride;  // elements
  const int* cu_seqlens_q;    // [batch + 1], or null
  const int* seqused_q;       // [batch], or null
  int batch, sq, total_q, hq, dv;
  int element_bytes;  // of o: 1, 2 or 4
};
