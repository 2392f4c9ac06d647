// Arguments of add_rows.cu, the same for the host and the device.
#pragma once
#include "host_device/element.h"

enum : int { kAddRowsThreads = 256 };

// Rows of heads with contiguous columns; strides in elements.
struct AddedRows {
  void* data;
  fulgur::kernels::Element type;
  long long batch, row, head;
};

struct AddRowsParams {
  AddedRows from, with, to;
  bool adds;  // to = from + with, in f32; else to = from
  long long batches, rows, heads, dim;
};
