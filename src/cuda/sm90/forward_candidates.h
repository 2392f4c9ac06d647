#pragma once

#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/sm90/forward_plan.h"

namespace fulgur::cuda::sm90 {

/// A plan for every tile that fits, with the stages that fit shared memory. Adds the reasons of
/// other tiles to `rejected`.
std::vector<Fitting<ForwardPlan>> forward_candidates(const Problem& problem, const Card& card,
                                                     std::vector<std::string>* rejected);

}  // namespace fulgur::cuda::sm90
