#pragma once

#include <utility>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/decode/decode_plan.h"

namespace fulgur::cuda::decode {

/// Every plan that computes a problem that is not rejected, with its cost: each tile that reads a
/// key once for all rows of a kv head, with each schedule that it can have. An invariant call has
/// one, which depends on nothing but what each sequence has.
std::vector<DecodePlan> decode_plans(const Problem& problem, const Card& card);

/// The plan that costs least.
Fitting<DecodePlan> decode_candidate(const Problem& problem, const Card& card);

/// The plans with every kernel that decode_candidate can take for calls like `problem` with any
/// lengths and batch, each with such a call.
std::vector<std::pair<Problem, DecodePlan>> decode_reachable(const Problem& problem,
                                                             const Card& card);

}  // namespace fulgur::cuda::decode
