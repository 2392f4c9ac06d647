#pragma once

#include <string>

#include "call/problem.h"

namespace fulgur::cuda {

/// The class of a problem: problems whose best tile is taken to be the same. It names all that the
/// choice of the tile depends on: dtype, d and dv rounded up to 16, what happens to scores, where
/// lengths come from, heads a group, whether gradients are deterministic; and the longest sq and
/// sk, batch * hq, and the mask's bounds where they bind, rounded up to three significant binary
/// digits (1 to 8, 10, 12, 14, 16, 20, ...), so that four classes cover an octave. Strides, LSE and
/// the value of scale are left out.
std::string shape_class(const Problem& problem);

}  // namespace fulgur::cuda
