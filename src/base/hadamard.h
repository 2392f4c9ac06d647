#pragma once

#include "base/check.h"

namespace fulgur {

/// A call of hadamard() whose arguments are checked.
struct HadamardCall {
  ConstTensor x;
  Tensor y;
  bool inverse;
  int64_t batch, rows, heads, columns;
};

/// Transforms one row in place.
void hadamard(float* x, int64_t columns, bool inverse);
/// Transforms tensors in host memory.
void hadamard(const HadamardCall& call, int threads);

}  // namespace fulgur
