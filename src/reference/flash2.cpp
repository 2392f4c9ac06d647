/// FlashAttention-2: the forward pass walks over blocks of Q, and O_i, l_i, m_i never leave fast
/// memory; the backward pass walks over blocks of K and V, for the sake of dK_j and dV_j.
/// FlashAttention-2, Alg. 1 (forward) and Alg. 2 (backward).
#include <cmath>

#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "reference/sink.h"

namespace fulgur::reference {

Forward flash2_forward(const Head& h, int64_t M, Traffic* traffic) {
  Forward out = flash2_forward_keys(h, 0, h.sk, M, traffic);
  join_sink(h, out);
  return out;
}

Forward flash2_forward_keys(const Head& h, int64_t key_begin, int64_t key_end, int64_t M,
                            Traffic* traffic) {
  const DropoutFactor Z(h.rule);
  const auto [Br, Bc] = BlockSizes(M, h);  // the loops are swapped, and so are the sizes
  Forward out{std::vector<double>(h.sq * h.dv), std::vector<double>(h.sq, -kInf)};

  for (const Range I : blocks({0, h.sq}, Br)) {  // Alg. 1, lines 1, 2, 3
    load(traffic, I.size() * h.d);               // Alg. 1, line 4: Q_i
    Matrix O(I.size(), h.dv);                    // Alg. 1, line 5
    std::vector<double> l(I.size()), m(I.size(), -kInf);
    for (const Range J : blocks({key_begin, key_end}, Bc)) {  // Alg. 1, line 6
      if (empty(h, I, J)) continue;                           // Section 3.1, causal masking
      load(traffic, J.size() * (h.d + h.dv));                 // Alg. 1, line 7: K_j, V_j
      work(traffic, I.size() * J.size(), h.d + h.dv, I.size());
      const Matrix S = scores(h, I, J);  // Alg. 1, line 8
      for (int64_t r = 0; r < I.size(); ++r) {
        const double m_new = maximum(m[r], rowmax(J.size(), S[r]));  // Alg. 1, line 9
        if (m_new == -kInf) continue;                                // no key seen yet
        const double rescale = std::exp(m[r] - m_new);
        m[r] = m_new;
        l[r] *= rescale;                                        // Alg. 1, line 9
        for (int64_t c = 0; c < h.dv; ++c) O[r][c] *= rescale;  // Alg. 1, line 10
        for (int64_t j = J.begin; j < J.end; ++j) {
          if (S[r][j - J.begin] == -kInf) continue;
          const double P = std::exp(S[r][j - J.begin] - m_new);          // Alg. 1, line 9
          l[r] += P;                                                     // Alg. 1, line 9
          add_scaled(h.dv, Z(I.begin + r, j, P), h.v + j * h.dv, O[r]);  // Alg. 1, line 10
        }
      }
    }
    for (int64_t r = 0; r < I.size(); ++r) {
      if (m[r] == -kInf) continue;  // sees no key: O = 0, LSE = -inf
      add_scaled(h.dv, 1 / l[r], O[r], &out.o[(I.begin + r) * h.dv]);  // Alg. 1, line 12
      out.lse[I.begin + r] = m[r] + std::log(l[r]);                    // Alg. 1, line 13
    }
    store(traffic, I.size() * (h.dv + 1));  // Alg. 1, lines 14, 15: O_i, L_i
  }
  return out;  // Alg. 1, line 17
}

Backward flash2_backward(const Head& h, const Forward& forward, const OutputGradient& dout,
                         int64_t M, Traffic* traffic, const BiasGradient& dbias) {
  const auto& [O, L] = forward;
  const DropoutFactor Z(h.rule);
  const auto [Bc, Br] = BlockSizes(M, h);
  std::vector<double> dQ(h.sq * h.d), dK(h.sk * h.d), dV(h.sk * h.dv);  // Alg. 2, lines 3, 7
  store(traffic, h.sq * h.d);

  double dsink = 0;
  std::vector<double> D(h.sq);  // Alg. 2, line 4: D = rowsum(dO o O), less dLSE
  load(traffic, 2 * h.sq * h.dv + (dout.lse == nullptr ? 0 : h.sq));
  for (int64_t i = 0; i < h.sq; ++i) {
    D[i] = dot(h.dv, dout.o + i * h.dv, &O[i * h.dv]) - dout.lse_of(i);
    dsink += sink_gradient(h, L[i], D[i]);
  }
  store(traffic, h.sq);

  for (const Range J : blocks({0, h.sk}, Bc)) {    // Alg. 2, lines 1, 5
    load(traffic, J.size() * (h.d + h.dv));        // Alg. 2, line 6: K_j, V_j
    for (const Range I : blocks({0, h.sq}, Br)) {  // Alg. 2, lines 2, 8
      if (empty(h, I, J)) continue;                // Section 3.1, causal masking
      // Alg. 2, lines 9, 15: Q_i, dQ_i, dO_i, L_i, D_i (O_i only served D)
      load(traffic, I.size() * (2 * h.d + h.dv + 2));
      work(traffic, I.size() * J.size(), 3 * h.d + 2 * h.dv);
      for (int64_t i = I.begin; i < I.end; ++i) {
        const double *q_i = h.q + i * h.d, *dO_i = dout.o + i * h.dv;
        for (int64_t j = J.begin; j < J.end; ++j) {
          const double *k_j = h.k + j * h.d, *v_j = h.v + j * h.dv;
          const auto [S, dS_dqk] = score(h, i, j);  // Alg. 2, line 10
          if (S == -kInf) continue;
          const double P = std::exp(S - L[i]);                // Alg. 2, line 11
          add_scaled(h.dv, Z(i, j, P), dO_i, &dV[j * h.dv]);  // Alg. 2, line 12
          const double dP = Z(i, j, dot(h.dv, dO_i, v_j));    // Alg. 2, line 13
          const double dS = P * (dP - D[i]);                  // Alg. 2, line 14
          add_gradients(h, i, j, dS, dbias);
          add_scaled(h.d, dS * dS_dqk, k_j, &dQ[i * h.d]);  // Alg. 2, line 15
          add_scaled(h.d, dS * dS_dqk, q_i, &dK[j * h.d]);  // Alg. 2, line 16
        }
      }
      store(traffic, I.size() * h.d);  // Alg. 2, line 15: dQ_i
    }
    store(traffic, J.size() * (h.d + h.dv));  // Alg. 2, line 18: dK_j, dV_j
  }
  return {dQ, dK, dV, dsink};  // Alg. 2, line 20
}

}  // namespace fulgur::reference
