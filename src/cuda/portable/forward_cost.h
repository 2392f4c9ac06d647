#pragma once

#include "cuda/portable/forward_config.h"

namespace fulgur::cuda::portable {

/// Predicts the cycles of a plan on a card from rates of its SMs alone: mma.sync, f32 instructions,
/// exponentials, and bytes of shared memory and of L2.
double predicted_cycles(const ForwardPlan& plan, const Problem& problem, const Card& card);

}  // namespace fulgur::cuda::portable
