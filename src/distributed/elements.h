/// Access to the elements of tensors in host memory, one by one.
#pragma once

#include <cstdint>

#include "base/convert.h"
#include "fulgur/tensor.h"

namespace fulgur::distributed {

/// Calls visit(offset in x, offset in y) for all elements of two tensors of the same shape.
template <int kDim = 0, class Visit>
void each_element(const ConstTensor& x, const ConstTensor& y, const Visit& visit, int64_t at_x = 0,
                  int64_t at_y = 0) {
  if constexpr (kDim < ConstTensor::kMaxRank) {
    if (kDim < x.rank) {
      for (int64_t i = 0; i < x.shape[kDim]; ++i) {
        each_element<kDim + 1>(x, y, visit, at_x + i * x.strides[kDim], at_y + i * y.strides[kDim]);
      }
      return;
    }
  }
  visit(at_x, at_y);
}

inline void convert(const ConstTensor& from, const Tensor& to) {
  each_element(from, to, [&](int64_t x, int64_t y) {
    store_element(to.data, to.dtype, y, load_element(from.data, from.dtype, x));
  });
}

}  // namespace fulgur::distributed
