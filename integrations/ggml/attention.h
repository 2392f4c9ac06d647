#pragma once

#include <string>

#include "ggml.h"

namespace fulgur_ggml {

/// The vectors that fulgur computes by, such as "AVX3"; empty where the machine has none for it.
std::string kernel();

/// Why fulgur does not compute a GGML_OP_FLASH_ATTN_EXT; null where it does.
const char* why_not(const ggml_tensor& op);

/// Computes an operation that has no such reason. `threads`: 0 = all cores. Throws fulgur::Error.
void compute(const ggml_tensor& op, int threads);

}  // namespace fulgur_ggml
