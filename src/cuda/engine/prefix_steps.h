#pragma once

#include <memory>

#include "cuda/device/gpu.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// The steps of a divided call of a problem other than attention.
std::unique_ptr<const PrefixSteps> prefix_steps(const Problem& problem, Gpu& gpu);

}  // namespace fulgur::cuda
