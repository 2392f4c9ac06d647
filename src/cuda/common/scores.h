#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// Computes scores and probabilities, with one kernel for every architecture.
const Family& scores_family();

}  // namespace fulgur::cuda
