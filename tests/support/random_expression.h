/// Random typed expressions, each with a function of C++ that computes the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "fulgur/expression.h"

namespace fulgur::test {

/// Where a score is.
struct ScorePlace {
  int64_t b = 0, h = 0, hk = 0, q = 0, k = 0, sq = 1, sk = 1, q0 = 0;
  double score = 0;
};

/// A value of a place; of a bool 0 or 1.
using ValueAt = std::function<double(const ScorePlace&)>;

struct KnownExpr {
  Expr expr;
  ValueAt value;
};

/// A tensor that random expressions index, row-major.
struct KnownTensor {
  TensorSymbol symbol;
  std::vector<int64_t> shape;
  std::vector<double> values;
};

/// Expressions whose values stay small. `smooth`: none jumps where rounding may decide, so that f32
/// is as good as f64.
class RandomExpressions {
 public:
  RandomExpressions(uint64_t seed, std::vector<KnownTensor> tensors, bool smooth)
      : random_(seed), tensors_(std::move(tensors)), smooth_(smooth) {}

  KnownExpr number(int depth) {
    if (depth <= 0) return number_leaf();
    switch (below(13)) {
      case 0:
        return both(number(depth - 1), number(depth - 1), [](auto x, auto y) { return x + y; });
      case 1:
        return both(number(depth - 1), number(depth - 1), [](auto x, auto y) { return x - y; });
      case 2: {
        const KnownExpr x = number(depth - 1), y = bounded(depth - 1);
        return {x.expr * y.expr, [=](const ScorePlace& p) { return x.value(p) * y.value(p); }};
      }
      case 3: {
        const KnownExpr x = number(depth - 1), y = number(depth - 1);
        return {x.expr / (1 + abs(y.expr)),
                [=](const ScorePlace& p) { return x.value(p) / (1 + std::fabs(y.value(p))); }};
      }
      case 4: {
        const KnownExpr c = condition(depth - 1), x = number(depth - 1), y = number(depth - 1);
        return {select(c.expr, x.expr, y.expr),
                [=](const ScorePlace& p) { return c.value(p) != 0 ? x.value(p) : y.value(p); }};
      }
      case 5: {
        const KnownExpr x = number(depth - 1), y = number(depth - 1);
        return {max(x.expr, y.expr),
                [=](const ScorePlace& p) { return std::fmax(x.value(p), y.value(p)); }};
      }
      case 6: {
        const KnownExpr x = number(depth - 1);
        return {clamp(x.expr, -1.5, 2),
                [=](const ScorePlace& p) { return std::fmin(std::fmax(x.value(p), -1.5), 2); }};
      }
      case 7: {
        const KnownExpr x = number(depth - 1);
        return {sqrt(1 + abs(x.expr)) - log(2 + abs(x.expr)), [=](const ScorePlace& p) {
                  const double a = std::fabs(x.value(p));
                  return std::sqrt(1 + a) - std::log(2 + a);
                }};
      }
      case 8: {
        const KnownExpr x = integer(depth - 1);
        return {to_float(x.expr) * 0.125, [=](const ScorePlace& p) { return x.value(p) * 0.125; }};
      }
      case 9: {
        const KnownExpr x = number(depth - 1);
        return {-x.expr, [=](const ScorePlace& p) { return -x.value(p); }};
      }
      case 10:
        if (!smooth_) {
          const KnownExpr x = number(depth - 1);
          return {floor(x.expr), [=](const ScorePlace& p) { return std::floor(x.value(p)); }};
        }
        [[fallthrough]];
      default:
        return bounded(depth - 1);
    }
  }

  /// Between -1.5 and 1.5.
  KnownExpr bounded(int depth) {
    const KnownExpr x = number(depth);
    switch (below(7)) {
      case 0:
        return {sigmoid(x.expr),
                [=](const ScorePlace& p) { return 1 / (1 + std::exp(-x.value(p))); }};
      case 1:
        return {sin(x.expr), [=](const ScorePlace& p) { return std::sin(x.value(p)); }};
      case 2:
        return {cos(x.expr), [=](const ScorePlace& p) { return std::cos(x.value(p)); }};
      case 3:
        return {erf(x.expr), [=](const ScorePlace& p) { return std::erf(x.value(p)); }};
      case 4:
        return {exp(-abs(x.expr)),
                [=](const ScorePlace& p) { return std::exp(-std::fabs(x.value(p))); }};
      case 5:
        return {rsqrt(1 + x.expr * x.expr),
                [=](const ScorePlace& p) { return 1 / std::sqrt(1 + x.value(p) * x.value(p)); }};
      default:
        return {tanh(x.expr), [=](const ScorePlace& p) { return std::tanh(x.value(p)); }};
    }
  }

  KnownExpr integer(int depth) {
    if (depth <= 0) return integer_leaf();
    const auto x = integer(depth - 1);
    const int64_t n = 1 + below(9);
    switch (below(9)) {
      case 0:
        return both(x, integer(depth - 1), [](auto a, auto c) { return a + c; });
      case 1:
        return both(x, integer(depth - 1), [](auto a, auto c) { return a - c; });
      case 2:
        return {floor_div(x.expr, n), [=](const ScorePlace& p) {
                  const auto a = whole(x, p);
                  return static_cast<double>(a >= 0 ? a / n : -((-a + n - 1) / n));
                }};
      case 3:
        return {x.expr % n, [=](const ScorePlace& p) {
                  return static_cast<double>((whole(x, p) % n + n) % n);
                }};
      case 4:
        return {abs(x.expr), [=](const ScorePlace& p) { return std::fabs(x.value(p)); }};
      case 5: {
        const auto y = integer(depth - 1);
        return {min(x.expr, y.expr),
                [=](const ScorePlace& p) { return std::min(x.value(p), y.value(p)); }};
      }
      case 6:
        return {(x.expr & 15) ^ 5,
                [=](const ScorePlace& p) { return static_cast<double>((whole(x, p) & 15) ^ 5); }};
      case 7:
        return {(x.expr >> 1) | 8,
                [=](const ScorePlace& p) { return static_cast<double>((whole(x, p) >> 1) | 8); }};
      default:
        return {x.expr * static_cast<int>(n),
                [=](const ScorePlace& p) { return x.value(p) * static_cast<double>(n); }};
    }
  }

  KnownExpr condition(int depth) {
    const auto x = integer(depth - 1), y = integer(depth - 1);
    switch (below(depth > 0 ? 9 : 5)) {
      case 0:
        return {x.expr == y.expr, [=](const ScorePlace& p) { return x.value(p) == y.value(p); }};
      case 1:
        return {x.expr != y.expr, [=](const ScorePlace& p) { return x.value(p) != y.value(p); }};
      case 2:
        return {x.expr >= y.expr, [=](const ScorePlace& p) { return x.value(p) >= y.value(p); }};
      case 3:
        return {bit(x.expr, 1), [=](const ScorePlace& p) { return (whole(x, p) >> 1 & 1) != 0; }};
      case 4:
        return {x.expr < y.expr, [=](const ScorePlace& p) { return x.value(p) < y.value(p); }};
      case 5: {
        const auto c = condition(depth - 1), e = condition(depth - 1);
        return {c.expr && e.expr,
                [=](const ScorePlace& p) { return c.value(p) != 0 && e.value(p) != 0; }};
      }
      case 6: {
        const auto c = condition(depth - 1), e = condition(depth - 1);
        return {c.expr || e.expr,
                [=](const ScorePlace& p) { return c.value(p) != 0 || e.value(p) != 0; }};
      }
      case 7: {
        const auto c = condition(depth - 1);
        return {!c.expr, [=](const ScorePlace& p) { return c.value(p) == 0; }};
      }
      default: {
        const auto c = condition(depth - 1), e = condition(depth - 1);
        return {c.expr ^ e.expr, [=](const ScorePlace& p) { return c.value(p) != e.value(p); }};
      }
    }
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  static int64_t whole(const KnownExpr& x, const ScorePlace& p) {
    return static_cast<int64_t>(x.value(p));
  }

  template <class F>
  static KnownExpr both(const KnownExpr& x, const KnownExpr& y, F f) {
    return {f(x.expr, y.expr), [=](const ScorePlace& p) { return f(x.value(p), y.value(p)); }};
  }

  KnownExpr number_leaf() {
    if (below(3) == 0) {
      const double value = static_cast<double>(below(64)) / 16 - 2;
      return {value, [=](const ScorePlace&) { return value; }};
    }
    if (const KnownTensor* t = any_tensor(true); t != nullptr && below(2) == 0) return gather(*t);
    return {symbols::score, [](const ScorePlace& p) { return p.score; }};
  }

  KnownExpr integer_leaf() {
    if (const KnownTensor* t = any_tensor(false); t != nullptr && below(4) == 0) return gather(*t);
    const int64_t value = below(40) - 8;
    switch (below(9)) {
      case 0:
        return {value, [=](const ScorePlace&) { return static_cast<double>(value); }};
      case 1:
        return {symbols::b, [](const ScorePlace& p) { return static_cast<double>(p.b); }};
      case 2:
        return {symbols::h, [](const ScorePlace& p) { return static_cast<double>(p.h); }};
      case 3:
        return {symbols::hk + symbols::q0,
                [](const ScorePlace& p) { return static_cast<double>(p.hk + p.q0); }};
      case 4:
        return {symbols::sk - symbols::sq,
                [](const ScorePlace& p) { return static_cast<double>(p.sk - p.sq); }};
      case 5:
        return {symbols::delta,
                [](const ScorePlace& p) { return static_cast<double>(p.k - p.q - (p.sk - p.sq)); }};
      case 6:
        return {symbols::q, [](const ScorePlace& p) { return static_cast<double>(p.q); }};
      default:
        return {symbols::k, [](const ScorePlace& p) { return static_cast<double>(p.k); }};
    }
  }

  const KnownTensor* any_tensor(bool floats) {
    std::vector<const KnownTensor*> all;
    for (const KnownTensor& t : tensors_) {
      const bool is_float = t.symbol.dtype() != DType::kI32 && t.symbol.dtype() != DType::kI64;
      if (is_float == floats) all.push_back(&t);
    }
    return all.empty() ? nullptr : all[below(static_cast<int64_t>(all.size()))];
  }

  /// Indices that are sometimes outside of the tensor.
  KnownExpr gather(const KnownTensor& t) {
    std::vector<Expr> indices;
    std::vector<ValueAt> values;
    for (size_t i = 0; i < t.shape.size(); ++i) {
      const KnownExpr index = below(3) == 0 ? integer(1) : index_leaf();
      indices.push_back(index.expr);
      values.push_back(index.value);
    }
    const auto shape = t.shape;
    const auto data = t.values;
    return {t.symbol.at(indices), [=](const ScorePlace& p) {
              int64_t at = 0;
              for (size_t i = 0; i < shape.size(); ++i) {
                const auto index = static_cast<int64_t>(values[i](p));
                at = at * shape[i] + std::min(std::max<int64_t>(index, 0), shape[i] - 1);
              }
              return data[at];
            }};
  }

  KnownExpr index_leaf() {
    switch (below(4)) {
      case 0:
        return {symbols::b, [](const ScorePlace& p) { return static_cast<double>(p.b); }};
      case 1:
        return {symbols::h, [](const ScorePlace& p) { return static_cast<double>(p.h); }};
      case 2:
        return {symbols::q, [](const ScorePlace& p) { return static_cast<double>(p.q); }};
      default:
        return {symbols::k, [](const ScorePlace& p) { return static_cast<double>(p.k); }};
    }
  }

  std::mt19937_64 random_;
  std::vector<KnownTensor> tensors_;
  bool smooth_;
};

}  // namespace fulgur::test
