#pragma once

#include "cuda/gpu.h"
#include "cuda/hopper_forward_plan.h"
#include "engine.h"

namespace fulgur::cuda {

/// The CUDA engine: kernels compiled at run time for the device that a problem names.
const Engine& engine();

/// Device `index`, where it can compute. Throws Error(kUnavailable) otherwise.
Gpu& hopper_gpu(int index);

/// What planning must know of it.
HopperTarget target_of(const Gpu& gpu);

}  // namespace fulgur::cuda
