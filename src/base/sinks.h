// An attention sink joins the softmax of a row as one more key without a value, after the row has
// seen all its keys. A sink of -inf has no effect.
#pragma once

#include <cmath>
#include <limits>

namespace fulgur {

/// A row after its sink has joined.
struct SinkJoined {
  double lse;
  double keys;  ///< the share of its keys in the softmax, by which O shrinks
};

/// `lse`: of the keys alone, -inf where the row sees none.
inline SinkJoined join_sink(double sink, double lse) {
  if (sink == -std::numeric_limits<double>::infinity()) return {lse, 1};
  const double above = sink - lse;
  return {above > 0 ? sink + std::log1p(std::exp(-above)) : lse + std::log1p(std::exp(above)),
          1 / (1 + std::exp(above))};
}

/// The probability of the sink, by the LSE that it is in: 1 where both are +inf, 0 where either is
/// -inf.
inline double sink_probability(double sink, double lse) {
  if (lse == -std::numeric_limits<double>::infinity()) return 0;
  return sink == lse ? 1 : std::exp(sink - lse);
}

}  // namespace fulgur
