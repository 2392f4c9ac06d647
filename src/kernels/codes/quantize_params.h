// Arguments of quantize.cu, the same for the host and the device.
#pragma once
#include "common/append_params.h"

struct MeasureParams {
  AppendRows rows;  // to quantize, with its AppendCodes; or to dequantize
  int batch, rows_each;
  int slices;       // into which the rows of a sequence are divided
  float* measured;  // [batch][heads][slices][4]: Extremes
};
