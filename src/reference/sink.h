/// The sink of a head: it joins the softmax of a row once, when all keys of the row are in. That of
/// gpt-oss, after the tokens that StreamingLLM (arXiv 2309.17453) found to take up attention.
#pragma once

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

/// What a row adds to dsink: P (dP - D) for a key whose value, and so dP, is 0. D has dLSE in it.
inline double sink_gradient(const Head& h, double lse, double D) {
  const double P = sink_probability(h.rule.sink, lse);
  return P == 0 ? 0 : -P * D;
}

}  // namespace fulgur::reference
