#pragma once

#include <cstdint>
#include <limits>

#include "base/convert.h"

namespace fulgur {

/// The dense bias of a head of a sequence, one element at a time.
struct HeadBias {
  const void* data = nullptr;  ///< null: no bias
  DType dtype = DType::kF32;
  int64_t first = 0, row = 0, key = 0;  ///< elements in front of those of the head, and strides

  bool given() const { return data != nullptr; }
  /// What the score of query i and key j takes; -inf hides the key. Of bools that is what false
  /// does, and true adds 0.
  double at(int64_t i, int64_t j) const {
    const double x = load_element(data, dtype, first + i * row + j * key);
    if (dtype != DType::kBool) return x;
    return x != 0 ? 0 : -std::numeric_limits<double>::infinity();
  }
};

}  // namespace fulgur
