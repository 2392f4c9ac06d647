// Arguments of means.cu, the same for the host and the device.
#pragma once
#include "common/append_params.h"

// The rows whose means are computed, and where the means are written.
struct MeansParams {
  AppendRows rows;
  int batch, rows_each;
};

// Adds the products of rows of q with the means of K to LSE, or stores them alone.
struct AddMeansParams {
  const void* q;
  long long q_batch, q_row, q_head;  // strides
  AppendCodes codes;                 // of q; none if it is not quantized
  float* lse;
  long long lse_batch, lse_head;
  const float* mean;
  long long mean_batch, mean_head;
  float scale;  // of scores
  int batch, rows_each, heads, group, dim;
  bool adds;
  const int* cu_seqlens;  // [batch + 1], or null: then all rows belong to one sequence
};
