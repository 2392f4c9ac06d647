#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// Invariant calls whose sequences have few rows or many, which only their lengths say: two kernels
/// compute the sequences that are their own.
const Family& hopper_invariant_by_rows();

}  // namespace fulgur::cuda
