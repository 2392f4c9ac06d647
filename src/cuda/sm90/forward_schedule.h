#pragma once

#include "cuda/common/card.h"
#include "cuda/sm90/forward_plan.h"

namespace fulgur::cuda::sm90 {

constexpr int kMaxSplits = 8;  ///< of a block; more have not been measured

/// Decides how the blocks of a plan whose tile and stages are set are distributed among CTAs.
/// Returns the predicted cycles of the call, by which tiles are compared; of an invariant call they
/// depend neither on its batch nor on its rows.
double schedule_and_predict(ForwardPlan& plan, const Problem& problem, const Card& card);

}  // namespace fulgur::cuda::sm90
