#pragma once

#include <string>

#include "call/problem.h"

namespace fulgur::cuda {

/// The class of a problem. Problems of a class are assumed to have the same best tile. It names all
/// properties that decide the tile: dtype, d and dv rounded up to 16, how scores are transformed,
/// which lengths are given, heads per group, whether gradients are deterministic; and the longest
/// sq and sk, batch * hq, and the mask's bounds if they bind, rounded up to three significant
/// binary digits (1 to 8, 10, 12, 14, 16, 20, ...), so that there are four classes per octave. It
/// does not depend on strides, LSE and the value of scale.
std::string shape_class(const Problem& problem);

}  // namespace fulgur::cuda
