#pragma once

#include "cuda/jit/target.h"

namespace fulgur::cuda::sm90 {

/// The target of the kernels for Hopper.
inline constexpr Target kTarget{90, Target::Form::kSpecific};

}  // namespace fulgur::cuda::sm90
