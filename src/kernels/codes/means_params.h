// Arguments of means.cu, the same for the host and the device.
#pragma once
#include "common/append_params.h"

// What the means of the columns of rows are written to: those of `rows`, which are read.
struct MeansParams {
  AppendRows rows;
  int batch, rows_each;
};

// LSE of rows of q takes their products with the means of K; or these alone go where `lse` says.
struct AddMeansParams {
  const void* q;
  long long q_batch, q_row, q_head;  // strides
  AppendCodes codes;                 // of q; none where it holds numbers
  float* lse;
  long long lse_batch, lse_head;
  const float* mean;
  long long mean_batch, mean_head;
  float scale;  // of scores
  int batch, rows_each, heads, group, dim;
  bool adds;
  const int* cu_seqlens;  // [batch + 1], or null; the rows of all sequences are then one sequence's
};
