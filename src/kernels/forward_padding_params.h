// Arguments of forward_padding.cu, the same for the host and the device.
#pragma once

struct ForwardPaddingParams {
  unsigned short* o;         // [total_q, hq, dv], 16-bit
  long long o_row_stride;    // elements
  long long o_head_stride;   // elements
  float* lse;                // [hq, total_q] or null
  long long lse_head_stride; // elements
  const int* cu_seqlens_q;   // [batch + 1]
  int batch, total_q, hq, dv;
};
