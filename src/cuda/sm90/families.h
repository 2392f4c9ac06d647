#pragma once

#include "cuda/common/planned_family.h"
#include "cuda/sm90/backward.h"
#include "cuda/sm90/forward.h"

namespace fulgur::cuda::sm90 {

using ForwardCandidate = PlannedCandidate<ForwardPlan, ForwardExecutable, forward_kernels>;
using BackwardCandidate = PlannedCandidate<BackwardPlan, BackwardExecutable, backward_kernels>;

/// The kernels of sm90/forward/ and sm90/backward/.
const Family& forward_family();
const Family& backward_family();

/// Invariant calls in which lengths decide whether a sequence has few rows or many: the decode
/// kernel computes the former, the forward kernel the latter.
const Family& invariant_by_rows_family();

}  // namespace fulgur::cuda::sm90
