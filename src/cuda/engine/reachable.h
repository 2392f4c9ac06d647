#pragma once

#include <functional>

#include "cuda/common/family.h"
#include "cuda/engine/architectures.h"

namespace fulgur::cuda {

/// Calls visit(candidates) with the ranked candidates, without tuning, of calls like `problem` with
/// lengths and batches of every kind, on every card that runs code for a target; then with what
/// each family says that it can reach besides.
void for_reachable(const Problem& problem, const Target& target,
                   const std::function<void(const Candidates&)>& visit);

}  // namespace fulgur::cuda
