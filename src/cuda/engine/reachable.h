#pragma once

#include <functional>

#include "cuda/common/family.h"
#include "cuda/engine/architectures.h"

namespace fulgur::cuda {

/// Calls visit(candidates) with the candidates, ranked without tuning, of calls like `problem` with
/// a sample of lengths and batches on every card that runs code for a target; then with
/// Family::reachable of each family.
void for_reachable(const Problem& problem, const Target& target,
                   const std::function<void(const Candidates&)>& visit);

}  // namespace fulgur::cuda
