#pragma once

#include <memory>

#include "engine/engine.h"

namespace fulgur::host {

std::unique_ptr<const CodeSteps> code_steps(const Problem& problem, int threads);

}  // namespace fulgur::host
