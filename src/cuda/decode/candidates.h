#pragma once

#include <utility>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/decode/decode_plan.h"

namespace fulgur::cuda::decode {

/// The plans that compute a problem that is not rejected, with their costs: each tile that reads a
/// key once for all rows of a kv head, with each schedule that it can have. An invariant call has
/// one plan, which depends only on what each sequence has.
std::vector<DecodePlan> decode_plans(const Problem& problem, const Card& card);

/// The plan with the least expected cycles.
Fitting<DecodePlan> decode_candidate(const Problem& problem, const Card& card);

/// The plans with every kernel that decode_candidate can take for calls like `problem` with any
/// lengths and batch, each with such a call.
std::vector<std::pair<Problem, DecodePlan>> decode_reachable(const Problem& problem,
                                                             const Card& card);

}  // namespace fulgur::cuda::decode
