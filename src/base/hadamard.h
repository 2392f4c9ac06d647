#pragma once

#include "base/check.h"

namespace fulgur {

/// Checked.
struct HadamardCall {
  ConstTensor x;
  Tensor y;
  bool inverse;
  int64_t batch, rows, heads, columns;
};

/// A row of so many columns.
void hadamard(float* x, int64_t columns, bool inverse);
/// Of tensors in the host's memory.
void hadamard(const HadamardCall& call, int threads);

}  // namespace fulgur
