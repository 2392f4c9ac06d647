/// The little linear algebra that the algorithms are written in.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace fulgur::reference {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Matrix {
  Matrix(int64_t rows, int64_t cols, double value = 0)
      : rows(rows), cols(cols), data(rows * cols, value) {}
  double* operator[](int64_t r) { return data.data() + r * cols; }
  const double* operator[](int64_t r) const { return data.data() + r * cols; }

  int64_t rows, cols;
  std::vector<double> data;
};

/// Four sums, none of which waits for the others.
inline double dot(int64_t n, const double* x, const double* y) {
  double sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) {
    sum0 += x[c] * y[c];
    sum1 += x[c + 1] * y[c + 1];
    sum2 += x[c + 2] * y[c + 2];
    sum3 += x[c + 3] * y[c + 3];
  }
  for (; c < n; ++c) sum0 += x[c] * y[c];
  return (sum0 + sum1) + (sum2 + sum3);
}

/// y += a x
inline void add_scaled(int64_t n, double a, const double* x, double* y) {
  for (int64_t c = 0; c < n; ++c) y[c] += a * x[c];
}

/// Unlike std::max, keeps a NaN, so that a bad score is seen in the output.
inline double maximum(double a, double b) { return a > b || std::isnan(a) ? a : b; }

/// -inf for an empty row.
inline double rowmax(int64_t n, const double* x) {
  double m = -kInf;
  for (int64_t c = 0; c < n; ++c) m = maximum(m, x[c]);
  return m;
}

}  // namespace fulgur::reference
