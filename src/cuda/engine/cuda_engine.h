#pragma once

#include "engine/engine.h"

namespace fulgur::cuda {

/// The CUDA engine, whose kernels are compiled at run time for the device of a problem.
const Engine& engine();

}  // namespace fulgur::cuda
