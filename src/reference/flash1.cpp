/// FlashAttention: blocks of K and V in the outer loop, blocks of Q in the inner loop. O_i stays
/// normalized and makes a round trip to slow memory, with l_i and m_i, for every block of keys.
/// FlashAttention, Alg. 2 (forward; Alg. 1 is the same without mask and dropout) and Alg. 4.
#include <cmath>

#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "reference/sink.h"

namespace fulgur::reference {

Flash1Forward flash1_forward(const Head& h, int64_t M, Traffic* traffic) {
  const DropoutFactor Z(h.rule);           // Alg. 2, line 1: a seed, not a state
  const auto [Bc, Br] = BlockSizes(M, h);  // Alg. 2, line 2
  std::vector<double> O(h.sq * h.dv), l(h.sq), m(h.sq, -kInf);  // Alg. 2, line 3
  store(traffic, h.sq * (h.dv + 2));

  for (const Range J : blocks({0, h.sk}, Bc)) {    // Alg. 2, lines 4, 6
    load(traffic, J.size() * (h.d + h.dv));        // Alg. 2, line 7: K_j, V_j
    for (const Range I : blocks({0, h.sq}, Br)) {  // Alg. 2, lines 5, 8
      load(traffic, I.size() * (h.d + h.dv + 2));  // Alg. 2, line 9: Q_i, O_i, l_i, m_i
      work(traffic, I.size() * J.size(), h.d + h.dv, I.size());
      const Matrix S = scores(h, I, J);  // Alg. 2, lines 10, 11
      for (int64_t i = I.begin; i < I.end; ++i) {
        const double* S_i = S[i - I.begin];
        const double m_tile = rowmax(J.size(), S_i);  // Alg. 2, line 12
        if (m_tile == -kInf) continue;  // no key of the block is seen: nothing changes
        double l_tile = 0;
        std::vector<double> PV(h.dv);
        for (int64_t j = J.begin; j < J.end; ++j) {
          if (S_i[j - J.begin] == -kInf) continue;
          const double P = std::exp(S_i[j - J.begin] - m_tile);     // Alg. 2, line 12
          l_tile += P;                                              // Alg. 2, line 12
          add_scaled(h.dv, Z(i, j, P), h.v + j * h.dv, PV.data());  // Alg. 2, line 14
        }
        const double m_new = maximum(m[i], m_tile);  // Alg. 2, line 13
        const double a = std::exp(m[i] - m_new) * l[i];
        const double b = std::exp(m_tile - m_new);
        const double l_new = a + b * l_tile;  // Alg. 2, line 13
        for (int64_t c = 0; c < h.dv; ++c) {  // Alg. 2, line 15
          O[i * h.dv + c] = (a * O[i * h.dv + c] + b * PV[c]) / l_new;
        }
        l[i] = l_new;  // Alg. 2, line 16
        m[i] = m_new;  // Alg. 2, line 16
      }
      store(traffic, I.size() * (h.dv + 2));  // Alg. 2, lines 15, 16: O_i, l_i, m_i
    }
  }
  for (int64_t i = 0; i < h.sq && h.rule.sink != -kInf; ++i) {
    const SinkJoined joined = join_sink(h.rule.sink, m[i] + std::log(l[i]));
    const bool sees_none = m[i] == -kInf;
    m[i] = joined.lse;
    l[i] = 1;
    if (sees_none) continue;  // O = 0
    for (int64_t c = 0; c < h.dv; ++c) O[i * h.dv + c] *= joined.keys;
  }
  return {O, l, m};  // Alg. 2, line 19
}

Backward flash1_backward(const Head& h, const Flash1Forward& forward, const OutputGradient& dout,
                         int64_t M, Traffic* traffic) {
  const auto& [O, l, m] = forward;
  const DropoutFactor Z(h.rule);                                        // Alg. 4, line 1
  const auto [Bc, Br] = BlockSizes(M, h);                               // Alg. 4, line 2
  std::vector<double> dQ(h.sq * h.d), dK(h.sk * h.d), dV(h.sk * h.dv);  // Alg. 4, lines 5, 8
  store(traffic, h.sq * h.d);
  double dsink = 0;
  for (int64_t i = 0; i < h.sq; ++i) {
    const double D_i = dot(h.dv, dout.o + i * h.dv, &O[i * h.dv]) - dout.lse_of(i);
    dsink += sink_gradient(h, m[i] + std::log(l[i]), D_i);
  }

  for (const Range J : blocks({0, h.sk}, Bc)) {    // Alg. 4, lines 3, 6
    load(traffic, J.size() * (h.d + h.dv));        // Alg. 4, line 7: K_j, V_j
    for (const Range I : blocks({0, h.sq}, Br)) {  // Alg. 4, lines 4, 9
      // Alg. 4, line 10: Q_i, O_i, dO_i, dQ_i, l_i, m_i
      load(traffic, I.size() * (2 * h.d + 2 * h.dv + 2));
      work(traffic, I.size() * J.size(), 3 * h.d + 2 * h.dv);
      for (int64_t i = I.begin; i < I.end; ++i) {
        const double *q_i = h.q + i * h.d, *dO_i = dout.o + i * h.dv;
        const double D_i = dot(h.dv, dO_i, &O[i * h.dv]) - dout.lse_of(i);  // Alg. 4, line 19
        for (int64_t j = J.begin; j < J.end; ++j) {
          const double *k_j = h.k + j * h.d, *v_j = h.v + j * h.dv;
          const auto [S, dS_dqk] = score(h, i, j);  // Alg. 4, lines 11, 12
          if (S == -kInf) continue;
          const double P = std::exp(S - m[i]) / l[i];         // Alg. 4, line 13
          add_scaled(h.dv, Z(i, j, P), dO_i, &dV[j * h.dv]);  // Alg. 4, lines 14 to 16
          const double dP = Z(i, j, dot(h.dv, dO_i, v_j));    // Alg. 4, lines 17, 18
          const double dS = P * (dP - D_i) * dS_dqk;          // Alg. 4, line 20
          add_scaled(h.d, dS, k_j, &dQ[i * h.d]);             // Alg. 4, line 21
          add_scaled(h.d, dS, q_i, &dK[j * h.d]);             // Alg. 4, line 22
        }
      }
      store(traffic, I.size() * h.d);  // Alg. 4, line 21: dQ_i
    }
    store(traffic, J.size() * (h.d + h.dv));  // Alg. 4, line 24: dK_j, dV_j
  }
  return {dQ, dK, dV, dsink};  // Alg. 4, line 26
}

}  // namespace fulgur::reference
