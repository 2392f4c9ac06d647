#pragma once

#include "cuda/sm90/backward.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/planned_family.h"

namespace fulgur::cuda::sm90 {

using ForwardCandidate = PlannedCandidate<ForwardPlan, ForwardExecutable, forward_kernels>;
using DecodeCandidate = PlannedCandidate<DecodePlan, DecodeExecutable, decode_kernels>;
using BackwardCandidate = PlannedCandidate<BackwardPlan, BackwardExecutable, backward_kernels>;

/// The kernels of sm90/forward/, sm90/decode/ and sm90/backward/.
const Family& forward_family();
const Family& decode_family();
const Family& backward_family();

}  // namespace fulgur::cuda::sm90
