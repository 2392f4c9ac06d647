#pragma once

#include <memory>

#include "cuda/device/gpu.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// What divided calls of a problem need besides attention.
std::unique_ptr<const PrefixSteps> prefix_steps(const Problem& problem, Gpu& gpu);

}  // namespace fulgur::cuda
