/// Bounds of the distance of a key from its query, which a mask has without an expression.
#pragma once

#include "fulgur/expression.h"
#include "fulgur/mask.h"

namespace fulgur::expression {

/// Which diagonals the bounds of a call's mask may count from: D(i) = i + sk - sq, as `delta` does,
/// or D(i) = i, as k - q does; both where they are the same.
struct Diagonals {
  bool bottom_right = true, top_left = false;
};

/// Moves the bounds of these distances that a mask_mod demands, besides other things, to `band`.
/// Returns what is left of it, not given where nothing is.
Expr take_bounds(const Expr& mask_mod, const Diagonals& diagonals, Mask* band);

}  // namespace fulgur::expression
