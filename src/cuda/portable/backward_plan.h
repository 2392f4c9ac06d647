#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/portable/backward_config.h"

namespace fulgur::cuda::portable {

/// Where things begin in the workspace, in bytes.
struct BackwardWorkspace : AnyBackwardWorkspace {
  int64_t tensor_sums = 0;  ///< of gradients of the tensors of expressions
};
BackwardWorkspace workspace_of(const Problem& problem, const BackwardPlan& plan);

/// A plan for every tile that fits. `rejected` takes the others and why.
std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& problem, const Card& card,
                                                       std::vector<std::string>* rejected);

/// The plan in sentences and as data.
Explanation describe(const BackwardPlan& plan);

}  // namespace fulgur::cuda::portable
