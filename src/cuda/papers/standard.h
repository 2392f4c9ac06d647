#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda::papers {

/// Standard attention, forward and backward: S and P in memory, in the precision of q
/// (FlashAttention, algorithms 0 and 3), by the kernels of papers/product.cu and
/// papers/softmax*.cu.
const Family& standard_family();

}  // namespace fulgur::cuda::papers
