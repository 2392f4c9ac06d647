#pragma once

#include "call/merge_call.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Launches the kernel that merges the parts. Throws the errors of append().
void merge(const MergeCall& call, const Run& run);

}  // namespace fulgur::cuda
