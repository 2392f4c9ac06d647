#pragma once

#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

/// A plan for every method to compute dQ and every tile that fits, with the stages that fit shared
/// memory and the fastest waves that fit max_workspace; if no waves fit, with those that need the
/// smallest workspace. Adds the reasons of other plans to `rejected`.
std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& problem, const Card& card,
                                                       std::vector<std::string>* rejected);

}  // namespace fulgur::cuda::sm90
