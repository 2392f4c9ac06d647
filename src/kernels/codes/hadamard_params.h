// Arguments of hadamard.cu, the same for the host and the device.
#pragma once
#include "common/append_params.h"

struct HadamardParams {
  AppendRows rows;  // x and y
  int batch, rows_each;
  int inverse;
  int to_f32;  // 1: y is f32, whatever x is
};
