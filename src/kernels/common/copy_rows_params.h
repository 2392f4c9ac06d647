// Arguments of common/copy_rows.cu and common/widen_rows.cu, the same for the host and the device.
#pragma once

struct ForwardCopyParams {
  const void* from;  // [batch, rows, heads, dim], any strides
  long long batch_stride;      // elements
  long long row_stride;        // elements
  long long head_stride;       // elements
  void* to;  // [batch, rows, heads, chunks], contiguous, 16 bytes each; zero beyond dim
  long long chunks;  // of a row
  long long batch, rows, heads, dim;
  int element_bytes;  // of `from`: 1, 2 or 4
  long long column_stride;  // elements
};
