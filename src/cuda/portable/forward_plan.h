#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/planned_family.h"
#include "cuda/portable/forward_config.h"

namespace fulgur::cuda::portable {

/// Offsets in the workspace, in bytes.
struct ForwardWorkspace : CallWorkspace {
  std::array<int64_t, 3> copies{};  ///< copies of q, k and v
};
ForwardWorkspace workspace_of(const Problem& problem, const ForwardPlan& plan);

/// Why portable/forward/forward.cu does not compute a problem, and what it computes; empty if it
/// computes it.
std::string forward_rejects(const Problem& problem);

/// A plan for every tile that fits. Adds the reasons of other tiles to `rejected`.
std::vector<Fitting<ForwardPlan>> forward_candidates(const Problem& problem, const Card& card,
                                                     std::vector<std::string>* rejected);

/// The plan in sentences and as data.
Explanation describe(const ForwardPlan& plan);

}  // namespace fulgur::cuda::portable
