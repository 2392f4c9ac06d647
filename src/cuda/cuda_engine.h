#pragma once

#include "cuda/family.h"
#include "cuda/gpu.h"
#include "engine.h"

namespace fulgur::cuda {

/// The CUDA engine: kernels compiled at run time for the device that a problem names.
const Engine& engine();

/// Device `index`, where it can compute. Throws Error(kUnavailable) otherwise.
Gpu& usable_gpu(int index);

/// What planning must know of it.
Target target_of(const Gpu& gpu);

}  // namespace fulgur::cuda
