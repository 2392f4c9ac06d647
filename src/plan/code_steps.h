#pragma once

#include <memory>
#include <string>
#include <vector>

#include "call/problem.h"
#include "engine/engine.h"
#include "plan/append_executable.h"

namespace fulgur {

/// Whether a call is over codes of rotated keys, or of keys less their means: q is rotated before
/// the attention, LSE takes the products of q and the means after it.
bool has_code_steps(const Problem& problem);

/// The problem of the attention between these steps.
Problem without_code_steps(Problem problem);

/// Plans such a call, as a composite plan. Appends to `rejected`. Throws Error(kUnsupported) where
/// means would have to be added to scores.
std::unique_ptr<const Executable> plan_code_steps(const Problem& problem, const Engine& engine,
                                                  int threads, const PlanAttention& plan_attention,
                                                  std::vector<std::string>* rejected);

}  // namespace fulgur
