// Arguments of backward/expression_round.cu, the same for the host and the device.
#pragma once
#include "host_device/expression.h"

struct ExpressionRoundParams {
  fulgur::kernels::ExpressionSums sums;
  int log_scores;
  void* data;  // the gradient
  fulgur::kernels::Element type;
  int shape[fulgur::kernels::kMaxExpressionRank];  // 1 before the first dimension
  long long stride[fulgur::kernels::kMaxExpressionRank];  // elements
  int count;  // number of elements
};
