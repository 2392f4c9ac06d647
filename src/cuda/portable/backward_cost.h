#pragma once

#include "cuda/portable/backward_config.h"

namespace fulgur::cuda::portable {

/// Predicts the cycles of a plan on a card from constants of its SMs alone: the rate of mma.sync,
/// lanes of f32, exponentials, bytes of shared memory and of additions to L2 a clock.
double predicted_cycles(const BackwardPlan& plan, const Problem& problem, const Card& card);

}  // namespace fulgur::cuda::portable
