#pragma once

#include <memory>
#include <string>
#include <vector>

#include "call/problem.h"
#include "engine/engine.h"
#include "plan/append_executable.h"

namespace fulgur {

/// Whether a call is over codes of rotated keys, or of keys from which their means were subtracted.
/// q is rotated before the attention, and the products of q and the means are added to LSE after
/// it. Where softcap, sinks or score_mod depend on the scores themselves, an expression adds these
/// products to the scores instead.
bool has_code_steps(const Problem& problem);

/// The problem of the attention between these steps.
Problem without_code_steps(Problem problem);

/// Plans such a call, as a composite plan. Adds the alternatives to `rejected`. Throws
/// Error(kUnsupported) if scores need their means with both softcap and ALiBi.
std::unique_ptr<const Executable> plan_code_steps(const Problem& problem, const Engine& engine,
                                                  int threads, const PlanAttention& plan_attention,
                                                  std::vector<std::string>* rejected);

}  // namespace fulgur
