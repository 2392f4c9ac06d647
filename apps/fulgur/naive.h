#pragma once

#include <vector>

#include "fulgur/attention.h"

namespace fulgur::app {

/// Attention of one head computed as the formula stands, every intermediate (S, P, dP, dS) rounded
/// to the input's dtype: the error that is to be expected of that dtype, which `check` measures the
/// engine against. The rounded results are kept as doubles.
struct NaiveHead {
  int64_t sq, sk, d, dv;
  const double *q, *k, *v;             // [sq, d] [sk, d] [sk, dv]
  const double* dout;                  // [sq, dv]
  double scale, softcap, slope, sink;  // sink: -inf without
  Mask mask;
  DType dtype;
};

struct NaiveResult {
  std::vector<double> out, dq, dk, dv;
};

NaiveResult naive_attention(const NaiveHead& head);

}  // namespace fulgur::app
