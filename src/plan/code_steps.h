#pragma once

#include <memory>
#include <string>
#include <vector>

#include "call/problem.h"
#include "engine/engine.h"
#include "plan/append_executable.h"

namespace fulgur {

/// Whether a call is over codes of rotated keys, or of keys less their means: q is rotated before
/// the attention, and LSE takes the products of q and the means after it; but where softcap, sinks
/// or score_mod want scores themselves, scores take them, by an expression.
bool has_code_steps(const Problem& problem);

/// The problem of the attention between these steps.
Problem without_code_steps(Problem problem);

/// Plans such a call, as a composite plan. Appends to `rejected`. Throws Error(kUnsupported) where
/// scores want their means, softcap and ALiBi.
std::unique_ptr<const Executable> plan_code_steps(const Problem& problem, const Engine& engine,
                                                  int threads, const PlanAttention& plan_attention,
                                                  std::vector<std::string>* rejected);

}  // namespace fulgur
