#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda::papers {

/// Standard attention, forward and backward, with S and P in memory in the precision of q
/// (FlashAttention (2022), algorithms 0 and 3), by papers/product.cu and papers/softmax*.cu.
const Family& standard_family();

}  // namespace fulgur::cuda::papers
