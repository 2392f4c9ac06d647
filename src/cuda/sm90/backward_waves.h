#pragma once

#include <cstdint>

#include "cuda/common/family.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

/// The most bytes of dS that a call may have in its workspace: 256 MB, or what its tensors take;
/// but a row block of one kv head has room, however long its keys are.
int64_t max_ds_bytes(const Problem& problem);

/// Sets the launches of a plan whose tile and stages are set: the splits of kv heads, the waves and
/// the cut blocks, the fastest whose workspace takes at most `max_workspace` bytes (0: any number),
/// or those with the smallest workspace if none fits. Returns the predicted cycles.
double plan_waves(BackwardPlan& plan, const Problem& problem, const Card& card,
                  int64_t max_workspace);

}  // namespace fulgur::cuda::sm90
