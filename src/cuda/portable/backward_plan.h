#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/portable/backward_config.h"

namespace fulgur::cuda::portable {

/// Byte offsets in the workspace, after the counters. All 0 if nothing is launched.
struct BackwardWorkspace {
  int64_t shift = 0, delta = 0;  ///< statistics of rows
  int64_t dq_accum = 0, dq_semaphore = 0;
  std::array<int64_t, 4> copies{};  ///< of q, k, v and dout
  int64_t tensor_sums = 0;          ///< of gradients of the tensors of expressions
  int64_t metadata = 0, end = 0;    ///< metadata of the host
};
BackwardWorkspace workspace_of(const Problem& problem, const BackwardPlan& plan);

/// A plan for every tile that fits. `rejected` takes the others and why.
std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& problem, const Card& card,
                                                       std::vector<std::string>* rejected);

/// The plan in sentences and as data.
Explanation describe(const BackwardPlan& plan);

}  // namespace fulgur::cuda::portable
