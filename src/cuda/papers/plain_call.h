#pragma once

#include <string>

#include "call/problem.h"

namespace fulgur::cuda::papers {

/// Why the papers' older algorithms do not compute a problem, and what they do compute: calls of
/// the papers, of dense tensors with a mask and no more; empty when they do.
std::string plain_call_rejects(const Problem& problem, int64_t max_dim);

}  // namespace fulgur::cuda::papers
