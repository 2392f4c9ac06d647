#pragma once

#include "call/merge_call.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Launches the kernel that combines the parts. Throws as append() does.
void merge(const MergeCall& call, const Run& run);

}  // namespace fulgur::cuda
