#pragma once

#include "fulgur/attention.h"
#include "merge_call.h"

namespace fulgur::cuda {

/// Launches the kernel that combines the parts. Throws as append() does.
void merge(const MergeCall& call, const Run& run);

}  // namespace fulgur::cuda
