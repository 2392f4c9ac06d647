/// How one entry of S and of the dropout mask Z is made from a head's rule.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "reference/head.h"
#include "reference/mask.h"
#include "reference/matrix.h"

namespace fulgur::reference {

/// S_ij and its derivative by the dot product q_i . k_j.
struct Score {
  double S, dS_dqk;
};

/// What a product q_i . k_j that the mask shows becomes by softcap and ALiBi.
inline Score capped_score(const Head& h, int64_t i, int64_t j, double qk) {
  const Rule& rule = h.rule;
  double S = rule.scale * qk;
  double dS_dqk = rule.scale;
  if (rule.softcap > 0) {
    const double t = std::tanh(S / rule.softcap);
    S = rule.softcap * t;
    dS_dqk *= 1 - t * t;
  }
  return {S - rule.slope * static_cast<double>(std::abs(distance(h, i, j))), dS_dqk};
}

/// The score hook: what such a product becomes before the softmax. Softcap, ALiBi and the score
/// expression are its bodies; a dense bias follows.
inline Score score_of_product(const Head& h, int64_t i, int64_t j, double qk) {
  const Score s = capped_score(h, i, j, qk);
  HeadExpressions* const expressions = h.rule.expressions;
  if (expressions == nullptr) return s;
  return {expressions->score(i, j, s.S), s.dS_dqk * expressions->derivative(i, j, s.S)};
}

/// Adds what dS_ij gives to the gradients of the bias and of the tensors of expressions.
inline void add_gradients(const Head& h, int64_t i, int64_t j, double dS,
                          const BiasGradient& dbias) {
  dbias.add(i, j, dS);
  if (h.rule.expressions == nullptr) return;
  const double qk = dot(h.d, h.q + i * h.d, h.k + j * h.d);
  h.rule.expressions->add_gradients(i, j, capped_score(h, i, j, qk).S, dS);
}

/// S_ij = -inf is the papers' MASK. Such an entry is skipped wherever it would be used, never
/// multiplied by 0: k_j and v_j may be NaN. Here k_j is not even read.
inline Score score(const Head& h, int64_t i, int64_t j) {
  if (!sees(h, i, j)) return {-kInf, 0};
  const double bias = h.rule.bias.given() ? h.rule.bias.at(i, j) : 0;
  if (bias == -kInf) return {-kInf, 0};
  const Score s = score_of_product(h, i, j, dot(h.d, h.q + i * h.d, h.k + j * h.d));
  return {s.S + bias, s.dS_dqk};
}

/// Z_ij x: x / (1 - p) for a kept entry, 0 for a dropped one, also if x is NaN. FlashAttention,
/// Alg. 4, line 14.
class DropoutFactor {
 public:
  explicit DropoutFactor(const Rule& rule)
      : dropout_(rule.dropout), head_index_(rule.head_index), part_(rule.part) {}
  double operator()(int64_t i, int64_t j, double x) const {
    if (dropout_.p == 0) return x;
    const bool kept = dropout_.mask.keeps(head_index_, part_.query + i, part_.key + j);
    return kept ? x / (1 - dropout_.p) : 0;
  }

 private:
  Dropout dropout_;
  uint64_t head_index_;
  Part part_;
};

}  // namespace fulgur::reference
