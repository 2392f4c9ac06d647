#pragma once

#include <string>

#include "call/problem.h"

namespace fulgur::cuda::sm90 {

/// Why sm90/forward/forward.cu does not compute a forward problem, and what it computes; empty if
/// it computes it.
std::string forward_rejects(const Problem& problem);

}  // namespace fulgur::cuda::sm90
