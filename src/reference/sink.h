/// The sink of a head: it joins the softmax of a row once, when all keys of the row are in. That of
/// gpt-oss, after the tokens that StreamingLLM (arXiv 2309.17453) found to take up attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/sinks.h"
#include "reference/head.h"
#include "reference/matrix.h"

namespace fulgur::reference {

using fulgur::join_sink;

/// O and LSE of all rows, of the keys alone before.
inline void join_sink(const Head& h, Forward& out) {
  for (int64_t i = 0; i < h.sq; ++i) {
    const bool sees_none = out.lse[i] == -kInf;
    const SinkJoined joined = join_sink(h.rule.sink, out.lse[i]);
    out.lse[i] = joined.lse;
    if (sees_none) continue;  // O = 0
    for (int64_t c = 0; c < h.dv; ++c) out.o[i * h.dv + c] *= joined.keys;
  }
}

/// P = softmax(S) of a row of n keys with its sink, and its LSE. P of a row that sees no key is 0.
/// S may be P.
inline double softmax_row(int64_t n, const double* S, double sink, double* P) {
  const double m = rowmax(n, S);
  if (m == -kInf) {
    std::fill_n(P, n, 0.0);
    return sink;
  }
  double l = 0;
  for (int64_t j = 0; j < n; ++j) l += P[j] = std::exp(S[j] - m);
  const SinkJoined joined = join_sink(sink, m + std::log(l));
  for (int64_t j = 0; j < n; ++j) P[j] = P[j] / l * joined.keys;
  return joined.lse;
}

/// What a row adds to dsink: P (dP - D) for a key whose value, and so dP, is 0. D has dLSE in it.
inline double sink_gradient(const Head& h, double lse, double D) {
  const double P = sink_probability(h.rule.sink, lse);
  return P == 0 ? 0 : -P * D;
}

}  // namespace fulgur::reference
