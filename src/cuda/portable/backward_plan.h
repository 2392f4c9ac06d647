#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/portable/backward_config.h"

namespace fulgur::cuda::portable {

/// Offsets in the workspace, in bytes.
struct BackwardWorkspace : AnyBackwardWorkspace {
  int64_t tensor_sums = 0;  ///< sums for the gradients of tensors of expressions
};
BackwardWorkspace workspace_of(const Problem& problem, const BackwardPlan& plan);

/// Why portable/backward/keys.cu does not compute a problem, and what it computes; empty if it
/// computes it.
std::string backward_rejects(const Problem& problem);

/// A plan for every tile that fits. Adds the reasons of other tiles to `rejected`.
std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& problem, const Card& card,
                                                       std::vector<std::string>* rejected);

/// The plan in sentences and as data.
Explanation describe(const BackwardPlan& plan);

}  // namespace fulgur::cuda::portable
