#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda::papers {

/// FlashAttention (2022), algorithm 2, by papers/fa1_forward.cu.
const Family& fa1_forward_family();

/// Its backward pass, algorithm 4: the portable kernel by keys, in which a CTA computes all key
/// blocks of a kv head, one after the other.
const Family& fa1_backward_family();

}  // namespace fulgur::cuda::papers
