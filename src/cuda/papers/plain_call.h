#pragma once

#include <string>

#include "call/problem.h"

namespace fulgur::cuda::papers {

/// Why the papers' older algorithms do not compute a problem, and what they compute: the calls of
/// the papers, with dense tensors and a mask. Empty if they compute it.
std::string plain_call_rejects(const Problem& problem, int64_t max_dim);

}  // namespace fulgur::cuda::papers
