// Arguments of quantize.cu, the same for the host and the device.
#pragma once
#include "common/append_params.h"

struct MeasureParams {
  AppendRows rows;  // numbers and what makes codes of them; or codes that become numbers
  int batch, rows_each;
  int slices;       // of the rows of a sequence, which are measured apart
  float* measured;  // [batch][heads][slices][4]: Extremes
};
