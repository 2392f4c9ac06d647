#pragma once

#include "merge_call.h"

namespace fulgur::cpu {

/// Combines the parts row by row, in f64.
void merge(const MergeCall& call);

}  // namespace fulgur::cpu
