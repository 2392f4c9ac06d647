#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call/problem.h"
#include "engine/engine.h"

namespace fulgur {

/// Plans the attention that follows. Appends to `rejected`.
using PlanAttention =
    std::function<std::unique_ptr<const Executable>(const Problem&, std::vector<std::string>*)>;

/// Plans a call that brings new rows (ForwardArgs::append): by the engine, where its kernel appends
/// them itself, else to append first and attend then. Either gives the bits of both calls.
/// `threads`: as Options says.
std::unique_ptr<const Executable> plan_append(const Problem& problem, const Engine& engine,
                                              int threads, const PlanAttention& plan_attention,
                                              std::vector<std::string>* rejected);

}  // namespace fulgur
