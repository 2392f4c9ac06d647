/// Derivatives of expressions, as expressions: reverse mode.
#pragma once

#include <vector>

#include "expression/graph.h"

namespace fulgur::expression {

/// A gather of floats in an expression, and the derivative of the expression by its value.
struct GatherDerivative {
  Expr gather, derivative;
};

struct Derivatives {
  Expr by_score;  ///< 0 where it does not depend on it
  std::vector<GatherDerivative> by_gathers;
};

/// The derivatives of an expression of floats, as in PyTorch: where operands of min or max are
/// equal, each gets a half, and |x| has the derivative 0 at 0. Only the selected operand of
/// `select` has a derivative, so that infinities and NaN of the other one change nothing.
Derivatives derivatives(const Expr& of);

/// What `select(c, x, -inf)` hides moves from scores into masks, which skip what they hide: the
/// mask that a score's outermost selects make, not given where there is none, and what they choose.
struct Split {
  Expr score, mask;
};
Split split_mask(const Expr& score);

}  // namespace fulgur::expression
