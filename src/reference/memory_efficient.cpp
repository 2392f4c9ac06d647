/// Memory-efficient attention: with the softmax normalizer L_i known first, row i of the result is
/// a plain sum over the keys. O(N) memory, but K and V are read again for every query.
/// FlashAttention, Appendix B.1 (forward) and B.2 (backward). L_i is kept as its logarithm, LSE.
#include <cmath>

#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "reference/sink.h"

namespace fulgur::reference {

Forward memory_efficient_forward(const Head& h, Traffic* traffic) {
  const DropoutFactor Z(h.rule);
  Forward out{std::vector<double>(h.sq * h.dv), std::vector<double>(h.sq, -kInf)};
  for (int64_t i = 0; i < h.sq; ++i) {
    double* o_i = &out.o[i * h.dv];
    load(traffic, h.d + 2 * h.sk * h.d + h.sk * (h.d + h.dv));  // q_i; K, K, then K and V

    double m = -kInf;  // exp(S - m) cannot overflow
    for (int64_t j = 0; j < h.sk; ++j) m = maximum(m, score(h, i, j).S);
    if (m != -kInf) {
      double l = 0;
      for (int64_t j = 0; j < h.sk; ++j) l += std::exp(score(h, i, j).S - m);
      out.lse[i] = m + std::log(l);  // Eq. 1: L_i = sum_j exp(q_i . k_j)
    }
    out.lse[i] = join_sink(h.rule.sink, out.lse[i]).lse;

    for (int64_t j = 0; j < h.sk; ++j) {  // Eq. 2: o_i = sum_j exp(q_i . k_j) / L_i v_j
      const double S = score(h, i, j).S;
      if (S == -kInf) continue;
      add_scaled(h.dv, Z(i, j, std::exp(S - out.lse[i])), h.v + j * h.dv, o_i);
    }
    store(traffic, h.dv + 1);
  }
  return out;
}

Backward memory_efficient_backward(const Head& h, const Forward& forward,
                                   const OutputGradient& dout, Traffic* traffic) {
  const DropoutFactor Z(h.rule);
  Backward grad{std::vector<double>(h.sq * h.d), std::vector<double>(h.sk * h.d),
                std::vector<double>(h.sk * h.dv)};
  for (int64_t i = 0; i < h.sq; ++i) {
    const double *q_i = h.q + i * h.d, *dO_i = dout.o + i * h.dv;
    load(traffic, h.d + 2 * h.dv + 1);       // q_i, o_i, dO_i, LSE_i
    load(traffic, 2 * h.sk * (h.d + h.dv));  // k_j, v_j, dk_j, dv_j
    const double D_i = dot(h.dv, dO_i, &forward.o[i * h.dv]) - dout.lse_of(i);  // Eq. 4
    grad.dsink += sink_gradient(h, forward.lse[i], D_i);
    for (int64_t j = 0; j < h.sk; ++j) {
      const double *k_j = h.k + j * h.d, *v_j = h.v + j * h.dv;
      const auto [S, dS_dqk] = score(h, i, j);
      if (S == -kInf) continue;
      const double P = std::exp(S - forward.lse[i]);
      add_scaled(h.dv, Z(i, j, P), dO_i, &grad.dv[j * h.dv]);  // Eq. 3
      const double dP = Z(i, j, dot(h.dv, dO_i, v_j));
      const double dS = P * (dP - D_i) * dS_dqk;
      add_scaled(h.d, dS, k_j, &grad.dq[i * h.d]);  // Eq. 5
      add_scaled(h.d, dS, q_i, &grad.dk[j * h.d]);  // Eq. 6
    }
    store(traffic, h.d + h.sk * (h.d + h.dv));  // dq_i, dk_j, dv_j
  }
  return grad;
}

}  // namespace fulgur::reference
