#pragma once

#include "call/problem.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/plan.h"

namespace fulgur::cpu {

/// Computes a call by its plan: cuts its work into tasks and shares them out among threads.
/// `expressions`: null if the call has none. `memory`: CpuPlan::workspace_bytes().
void compute(const Problem& problem, const Kernels& kernels, const CpuPlan& plan,
             const expression::StagedGraph* expressions, const ForwardArgs& args, const Run& run,
             float* memory);
void compute(const Problem& problem, const Kernels& kernels, const CpuPlan& plan,
             const expression::StagedGraph* expressions, const BackwardArgs& args, const Run& run,
             float* memory);

}  // namespace fulgur::cpu
