#pragma once

#include "cuda/jit/target.h"

namespace fulgur::cuda::sm90 {

/// What the kernels for Hopper are compiled for.
inline constexpr Target kTarget{90, Target::Form::kSpecific};

}  // namespace fulgur::cuda::sm90
