#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call/problem.h"
#include "engine/engine.h"

namespace fulgur {

/// Plans the attention that follows the append. Adds the alternatives to `rejected`.
using PlanAttention =
    std::function<std::unique_ptr<const Executable>(const Problem&, std::vector<std::string>*)>;

/// Plans a call that brings new rows (ForwardArgs::append): as one kernel if the engine has one
/// that appends and attends, or else as append followed by attention. Both have the bits of two
/// separate calls. `threads` is that of the Options.
std::unique_ptr<const Executable> plan_append(const Problem& problem, const Engine& engine,
                                              int threads, const PlanAttention& plan_attention,
                                              std::vector<std::string>* rejected);

}  // namespace fulgur
