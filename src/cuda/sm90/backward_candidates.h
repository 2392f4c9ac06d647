#pragma once

#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

/// A plan for every way to compute dQ and every tile that fits, with the stages that the shared
/// memory has room for, and with the fastest waves that max_workspace has room for; if it has room
/// for none, with those that take the least. `rejected` takes the others and why.
std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& problem, const Card& card,
                                                       std::vector<std::string>* rejected);

}  // namespace fulgur::cuda::sm90
