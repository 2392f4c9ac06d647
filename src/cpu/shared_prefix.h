#pragma once

#include <memory>

#include "engine/engine.h"

namespace fulgur::cpu {

/// What divided calls need besides attention, by `threads` threads, as Options says.
std::unique_ptr<const PrefixSteps> prefix_steps(int threads);

}  // namespace fulgur::cpu
