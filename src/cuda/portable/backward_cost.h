#pragma once

#include "cuda/portable/backward_config.h"

namespace fulgur::cuda::portable {

/// Predicts the cycles of a plan on a card from rates of its SMs alone: mma.sync, f32 instructions,
/// exponentials, bytes of shared memory, and bytes added in L2.
double predicted_cycles(const BackwardPlan& plan, const Problem& problem, const Card& card);

}  // namespace fulgur::cuda::portable
