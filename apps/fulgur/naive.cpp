#include "naive.h"

#include <algorithm>
#include <cmath>

#include "io/convert.h"

namespace fulgur::app {
namespace {

double rounded(double x, DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return io::from_f16(io::to_f16(x));
    case DType::kBF16:
      return io::from_bf16(io::to_bf16(x));
    default:
      return static_cast<float>(x);
  }
}

/// A dense matrix of the naive computation; elements are rounded as they are stored.
struct Matrix {
  int64_t rows, cols;
  DType dtype;
  std::vector<double> x = std::vector<double>(static_cast<size_t>(rows * cols));

  double operator()(int64_t i, int64_t j) const { return x[i * cols + j]; }
  void set(int64_t i, int64_t j, double value) { x[i * cols + j] = rounded(value, dtype); }
};

/// a b^T or, element-wise, what `get` gives: sums in float, as a matrix unit does.
template <class A, class B>
Matrix product(int64_t rows, int64_t cols, int64_t inner, DType dtype, A a, B b) {
  Matrix c{rows, cols, dtype};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < inner; ++l) sum += static_cast<float>(a(i, l) * b(l, j));
      c.set(i, j, sum);
    }
  }
  return c;
}

/// Whether a key lies in the chunk of the one on the diagonal, which may be in front of the first.
bool in_one_chunk(int64_t chunk, int64_t key, int64_t diagonal) {
  const auto chunk_of = [&](int64_t i) {
    return std::floor(static_cast<double>(i) / static_cast<double>(chunk));
  };
  return chunk_of(key) == chunk_of(diagonal);
}

}  // namespace

NaiveResult naive_attention(const NaiveHead& h) {
  const auto q = [&](int64_t i, int64_t c) { return h.q[i * h.d + c]; };
  const auto k = [&](int64_t j, int64_t c) { return h.k[j * h.d + c]; };
  const auto v = [&](int64_t j, int64_t c) { return h.v[j * h.dv + c]; };
  const auto dout = [&](int64_t i, int64_t c) { return h.dout[i * h.dv + c]; };
  const auto transposed = [](auto m) { return [m](int64_t i, int64_t j) { return m(j, i); }; };

  // S = cap(scale Q K^T) + bias, masked; `slope_of_cap` is the derivative of the cap.
  Matrix S = product(h.sq, h.sk, h.d, h.dtype, q, transposed(k));
  Matrix slope_of_cap{h.sq, h.sk, h.dtype};
  for (int64_t i = 0; i < h.sq; ++i) {
    for (int64_t j = 0; j < h.sk; ++j) {
      const int64_t diagonal = h.mask.top_left ? i : i + h.sk - h.sq;
      double s = rounded(h.scale * S(i, j), h.dtype), slope = 1;
      if (h.softcap > 0) {
        const double t = rounded(std::tanh(s / h.softcap), h.dtype);
        s = h.softcap * t;
        slope = 1 - t * t;
      }
      s -= h.slope * static_cast<double>(std::abs(diagonal - j));
      const bool hidden = (h.mask.left >= 0 && j < diagonal - h.mask.left) ||
                          (h.mask.right >= 0 && j > diagonal + h.mask.right) ||
                          (h.mask.chunk > 0 && !in_one_chunk(h.mask.chunk, j, diagonal));
      S.set(i, j, hidden ? -INFINITY : s);
      slope_of_cap.set(i, j, slope);
    }
  }

  Matrix P{h.sq, h.sk, h.dtype};
  for (int64_t i = 0; i < h.sq; ++i) {
    double m = h.sink;
    for (int64_t j = 0; j < h.sk; ++j) m = std::max(m, S(i, j));
    if (m == -INFINITY) continue;  // sees no key, nor a sink: P stays 0
    auto l = static_cast<float>(std::exp(h.sink - m));
    for (int64_t j = 0; j < h.sk; ++j) l += static_cast<float>(std::exp(S(i, j) - m));
    for (int64_t j = 0; j < h.sk; ++j) P.set(i, j, std::exp(S(i, j) - m) / l);
  }
  const Matrix O = product(h.sq, h.dv, h.sk, h.dtype, P, v);

  // dV = P^T dO, dP = dO V^T, dS = P o (dP - rowsum(dO o O)), dQ = dS K, dK = dS^T Q.
  const Matrix dV = product(h.sk, h.dv, h.sq, h.dtype, transposed(P), dout);
  const Matrix dP = product(h.sq, h.sk, h.dv, h.dtype, dout, transposed(v));
  Matrix dS{h.sq, h.sk, h.dtype};
  for (int64_t i = 0; i < h.sq; ++i) {
    float D = 0;
    for (int64_t c = 0; c < h.dv; ++c) D += static_cast<float>(dout(i, c) * O(i, c));
    for (int64_t j = 0; j < h.sk; ++j) {
      dS.set(i, j, h.scale * slope_of_cap(i, j) * P(i, j) * (dP(i, j) - D));
    }
  }
  const Matrix dQ = product(h.sq, h.d, h.sk, h.dtype, dS, k);
  const Matrix dK = product(h.sk, h.d, h.sq, h.dtype, transposed(dS), q);
  return {O.x, dQ.x, dK.x, dV.x};
}

}  // namespace fulgur::app
