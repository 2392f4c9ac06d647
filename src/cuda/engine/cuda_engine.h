#pragma once

#include "engine/engine.h"

namespace fulgur::cuda {

/// The CUDA engine: kernels compiled at run time for the device that a problem names.
const Engine& engine();

}  // namespace fulgur::cuda
