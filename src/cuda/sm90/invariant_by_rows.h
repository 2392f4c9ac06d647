#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda::sm90 {

/// Invariant calls whose sequences have few rows or many, which only their lengths say: two kernels
/// compute the sequences that are their own.
const Family& invariant_by_rows_family();

}  // namespace fulgur::cuda::sm90
