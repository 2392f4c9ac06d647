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
  AddedRows from, with, to;
  bool adds;  // `from` and `with`, in f32; else `to` is `from`
  long long batches, rows, heads, dim;
};
