#pragma once

#include <memory>

#include "engine/engine.h"

namespace fulgur::host {

/// What divided calls need besides attention.
std::unique_ptr<const PrefixSteps> prefix_steps();

}  // namespace fulgur::host
