#pragma once

#include "cuda/sm90/backward.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/planned_family.h"

namespace fulgur::cuda {

using HopperForwardCandidate =
    PlannedCandidate<HopperForwardPlan, HopperForward, hopper_forward_kernels>;
using HopperDecodeCandidate =
    PlannedCandidate<HopperDecodePlan, HopperDecode, hopper_decode_kernels>;
using HopperBackwardCandidate =
    PlannedCandidate<HopperBackwardPlan, HopperBackward, hopper_backward_kernels>;

/// The kernels of sm90/forward/, sm90/decode/ and sm90/backward/.
const Family& hopper_forward_family();
const Family& hopper_decode_family();
const Family& hopper_backward_family();

}  // namespace fulgur::cuda
