#pragma once

#include "fulgur/attention.h"

namespace fulgur::app {

/// Computes `args`. Long work is done in up to 64 steps over batches and kv heads, which are
/// independent of each other, with a progress bar over them. Dropout, whose mask is a function of
/// the batch and head within the call, caches, and work on a GPU are one step.
/// Returns the seconds it took, planning apart where it is one step.
double run_in_steps(const ForwardArgs& args, const Options& options, const Run& run);
double run_in_steps(const BackwardArgs& args, const Options& options, const Run& run);

}  // namespace fulgur::app
