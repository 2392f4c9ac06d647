#pragma once

#include "cuda/common/planned_family.h"
#include "cuda/decode/decode.h"

namespace fulgur::cuda::decode {

using DecodeCandidate = PlannedCandidate<DecodePlan, DecodeExecutable, decode_kernels>;

/// The kernels of decode/ on Hopper.
const Family& hopper_family();

/// The warp path on every other GPU. It rejects invariant calls without codes: they use the forward
/// kernel, which splits no keys.
const Family& portable_family();

}  // namespace fulgur::cuda::decode
