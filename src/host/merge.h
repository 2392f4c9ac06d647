#pragma once

#include "call/merge_call.h"

namespace fulgur::host {

/// Combines the parts row by row, in f64. `threads`: as Options says.
void merge(const MergeCall& call, int threads);

}  // namespace fulgur::host
