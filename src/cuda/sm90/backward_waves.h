#pragma once

#include <cstdint>

#include "cuda/common/family.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

/// The maximum of bytes of dS in the workspace of a call: 256 MB, or the bytes of its tensors if
/// these are more; but at least a row block of one kv head.
int64_t max_ds_bytes(const Problem& problem);

/// Sets the launches of a plan whose tile and stages are set: the splits of kv heads, the waves and
/// the cut blocks. Chooses the fastest ones with at most `max_workspace` bytes of workspace (0: any
/// number), or those with the smallest workspace if none fits. Returns the predicted cycles.
double plan_waves(BackwardPlan& plan, const Problem& problem, const Card& card,
                  int64_t max_workspace);

}  // namespace fulgur::cuda::sm90
