// Arguments of add_rows.cu, which the host and the device share.
#pragma once
#include "host_device/element.h"

enum : int { kAddRowsThreads = 256 };

// Rows of heads, columns side by side; strides in elements.
struct AddedRows {
  void* data;
  fulgur::kernels::Element type;
  long long batch, row, head;
};

struct AddRowsParams {
  AddedRows from, to;
  bool adds;  // to what there is, in f32; else it is replaced
  long long batches, rows, heads, dim;
};
