#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/family.h"
#include "cuda/common/planned_family.h"
#include "cuda/sm90/forward_config.h"
#include "kernels/sm90/forward/params.h"

namespace fulgur::cuda::sm90 {

/// Offsets in the workspace, in bytes, after the counters and tickets. All are 0 if nothing is
/// launched.
struct ForwardWorkspace : CallWorkspace {
  int64_t partial = 0;                                     ///< partial results of split blocks
  std::array<int64_t, 4> copies{};                         ///< copies of q, k, v and the bias
  int64_t image = 0, means = 0, mean_steps = 0, sums = 0;  ///< V prepared for products of e4m3
};
ForwardWorkspace workspace_of(const Problem& problem, const ForwardPlan& plan);

/// The layout of V prepared for products of e4m3, without addresses.
CenteredValues centered_values(const Problem& problem, const ForwardPlan& plan);

/// Why sm90/forward/forward.cu does not compute a forward problem, and what it computes; empty if
/// it computes it.
std::string forward_rejects(const Problem& problem);

/// A plan for every tile that fits, with the stages that fit shared memory. Adds the reasons of
/// other tiles to `rejected`.
std::vector<Fitting<ForwardPlan>> forward_candidates(const Problem& problem, const Card& card,
                                                     std::vector<std::string>* rejected);

/// The plan in sentences and as data.
Explanation describe(const ForwardPlan& plan);

}  // namespace fulgur::cuda::sm90
