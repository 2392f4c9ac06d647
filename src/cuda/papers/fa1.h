#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda::papers {

/// FlashAttention, algorithm 2, by papers/fa1_forward.cu.
const Family& fa1_forward_family();

/// Its backward pass, algorithm 4: the portable kernel by keys, of which a CTA has all key blocks
/// of a kv head, one after another.
const Family& fa1_backward_family();

}  // namespace fulgur::cuda::papers
