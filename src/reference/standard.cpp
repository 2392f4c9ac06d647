/// Standard attention: S and P are computed whole and written to slow memory.
/// FlashAttention, Alg. 0 (forward) and Alg. 3 (backward).
#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "reference/sink.h"

namespace fulgur::reference {
namespace {

/// P = softmax(S), row by row, and LSE = log(sum of exp(S)), both with the sink.
Matrix softmax(const Matrix& S, double sink, std::vector<double>& lse) {
  Matrix P(S.rows, S.cols);
  for (int64_t i = 0; i < S.rows; ++i) lse[i] = softmax_row(S.cols, S[i], sink, P[i]);
  return P;
}

}  // namespace

Forward standard_forward(const Head& h, Traffic* traffic) {
  const DropoutFactor Z(h.rule);
  Forward out{std::vector<double>(h.sq * h.dv), std::vector<double>(h.sq, -kInf)};

  work(traffic, h.sq * h.sk, h.d + h.dv);
  load(traffic, h.sq * h.d + h.sk * h.d);  // Alg. 0, line 1: load Q, K; S = Q K^T; store S
  const Matrix S = scores(h, {0, h.sq}, {0, h.sk});
  store(traffic, h.sq * h.sk);

  load(traffic, h.sq * h.sk);  // Alg. 0, line 2: load S; P = softmax(S); store P
  const Matrix P = softmax(S, h.rule.sink, out.lse);
  store(traffic, h.sq * h.sk + h.sq);

  load(traffic, h.sq * h.sk + h.sk * h.dv);  // Alg. 0, line 3: load P, V; O = P V; store O
  for (int64_t i = 0; i < h.sq; ++i) {
    for (int64_t j = 0; j < h.sk; ++j) {
      if (S[i][j] == -kInf) continue;
      add_scaled(h.dv, Z(i, j, P[i][j]), h.v + j * h.dv, &out.o[i * h.dv]);
    }
  }
  store(traffic, h.sq * h.dv);
  return out;  // Alg. 0, line 4
}

Backward standard_backward(const Head& h, const OutputGradient& dout, Traffic* traffic,
                           const BiasGradient& dbias) {
  const DropoutFactor Z(h.rule);
  // The forward pass left P in slow memory; making it again is not counted.
  std::vector<double> lse(h.sq);
  const Matrix S = scores(h, {0, h.sq}, {0, h.sk});
  const Matrix P = softmax(S, h.rule.sink, lse);
  Matrix dP(h.sq, h.sk), dS(h.sq, h.sk);
  Backward grad{std::vector<double>(h.sq * h.d), std::vector<double>(h.sk * h.d),
                std::vector<double>(h.sk * h.dv)};
  const auto for_each_visible = [&](auto&& body) {
    for (int64_t i = 0; i < h.sq; ++i) {
      for (int64_t j = 0; j < h.sk; ++j) {
        if (S[i][j] != -kInf) body(i, j);
      }
    }
  };

  if (traffic) traffic->products += h.sq * h.sk * (2 * h.d + 2 * h.dv);
  load(traffic, h.sq * h.sk + h.sq * h.dv);  // Alg. 3, line 1: load P, dO; store dV = P^T dO
  for_each_visible([&](int64_t i, int64_t j) {
    add_scaled(h.dv, Z(i, j, P[i][j]), dout.o + i * h.dv, &grad.dv[j * h.dv]);
  });
  store(traffic, h.sk * h.dv);

  load(traffic, h.sq * h.dv + h.sk * h.dv);  // Alg. 3, line 2: load dO, V; store dP = dO V^T
  for_each_visible([&](int64_t i, int64_t j) {
    dP[i][j] = Z(i, j, dot(h.dv, dout.o + i * h.dv, h.v + j * h.dv));
  });
  store(traffic, h.sq * h.sk);

  load(traffic, 2 * h.sq * h.sk);  // Alg. 3, line 3: load P, dP; store dS = P o (dP - P . dP)
  std::vector<double> P_dP(h.sq);  // less dLSE, since dLSE / dS = P
  for (int64_t i = 0; i < h.sq; ++i) {
    P_dP[i] = dot(h.sk, P[i], dP[i]) - dout.lse_of(i);
    grad.dsink += sink_gradient(h, lse[i], P_dP[i]);
  }
  for_each_visible([&](int64_t i, int64_t j) {
    dS[i][j] = P[i][j] * (dP[i][j] - P_dP[i]);
    add_gradients(h, i, j, dS[i][j], dbias);
    dS[i][j] *= score(h, i, j).dS_dqk;
  });
  store(traffic, h.sq * h.sk);

  load(traffic, h.sq * h.sk + h.sk * h.d);  // Alg. 3, line 4: load dS, K; store dQ = dS K
  for_each_visible(
      [&](int64_t i, int64_t j) { add_scaled(h.d, dS[i][j], h.k + j * h.d, &grad.dq[i * h.d]); });
  store(traffic, h.sq * h.d);

  load(traffic, h.sq * h.sk + h.sq * h.d);  // Alg. 3, line 5: load dS, Q; store dK = dS^T Q
  for_each_visible(
      [&](int64_t i, int64_t j) { add_scaled(h.d, dS[i][j], h.q + i * h.d, &grad.dk[j * h.d]); });
  store(traffic, h.sk * h.d);
  return grad;  // Alg. 3, line 6
}

}  // namespace fulgur::reference
