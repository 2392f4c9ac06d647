#pragma once

#include <cstdint>
#include <limits>

#include "base/convert.h"
#include "kernels/host_device/score.h"

namespace fulgur {

/// The dense bias of a head of a sequence, which is read one element at a time.
struct HeadBias {
  const void* data = nullptr;  ///< null: no bias
  DType dtype = DType::kF32;
  int64_t first = 0, row = 0, key = 0;  ///< the offset of the head, and strides

  bool given() const { return data != nullptr; }
  /// The bias of query i and key j. It is -inf, which hides the key, for false and for numbers
  /// below kHidingBias, and 0 for true.
  double at(int64_t i, int64_t j) const {
    const double x = load_element(data, dtype, first + i * row + j * key);
    const bool hides = dtype == DType::kBool ? x == 0 : x < kernels::kHidingBias;
    if (hides) return -std::numeric_limits<double>::infinity();
    return dtype == DType::kBool ? 0 : x;
  }
};

}  // namespace fulgur
