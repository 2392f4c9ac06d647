// How far gradients of bf16 tensors are from those in double precision, with what their dtype
// costs in any case: a computation that rounds dS, P for dV, and the gradients.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "every_tile.h"

namespace fulgur::test {
namespace {

class GradientErrors : public OnGpu {};

// Two coordinates of each row are 20 times as large as the others.
void enlarge_outliers(const Tensor& tensor, int64_t dim) {
  constexpr int64_t kOutliers[] = {5, 11};
  std::vector<double> x = read(tensor);
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(dim)) {
    for (const int64_t i : kOutliers) x[row + static_cast<size_t>(i)] *= 20;
  }
  write(tensor, x);
}

double product(const double* a, const double* b, int64_t dim) {
  return std::inner_product(a, a + dim, b, 0.0);
}
void add(double* to, double weight, const double* x, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) to[i] += weight * x[i];
}

// The gradients of a workload of one head, by O and LSE as they are.
Outputs rounded_gradients(const Workload& w) {
  const Case& c = w.c;
  const auto q = read(w.forward.q), k = read(w.forward.k), v = read(w.forward.v);
  const auto dout = read(w.backward.dout), out = read(w.forward.out), lse = read(w.forward.lse);
  const double scale = 1 / std::sqrt(static_cast<double>(c.d));
  Outputs g;
  g.dq.resize(q.size());
  g.dk.resize(k.size());
  g.dv.resize(v.size());
  for (int64_t i = 0; i < c.batch * c.sq; ++i) {
    const auto query = static_cast<size_t>(i * c.d), row = static_cast<size_t>(i * c.dv);
    const double delta = product(&dout[row], &out[row], c.dv);
    const int64_t begin = i / c.sq * c.sk;
    const int64_t end = begin + (c.mask.right < 0 ? c.sk : i % c.sq + c.sk - c.sq + 1);
    for (int64_t j = begin; j < end; ++j) {
      const auto key = static_cast<size_t>(j * c.d), value = static_cast<size_t>(j * c.dv);
      const double score = scale * product(&q[query], &k[key], c.d);
      const double p = std::exp(score - lse[static_cast<size_t>(i)]);
      const double ds = rounded(p * (product(&dout[row], &v[value], c.dv) - delta), c.dtype);
      add(&g.dq[query], scale * ds, &k[key], c.d);
      add(&g.dk[key], scale * ds, &q[query], c.d);
      add(&g.dv[value], rounded(p, c.dtype), &dout[row], c.dv);
    }
  }
  for (std::vector<double>* gradient : {&g.dq, &g.dk, &g.dv}) {
    for (double& x : *gradient) x = rounded(x, c.dtype);
  }
  return g;
}

double rms_error(const std::vector<double>& got, const std::vector<double>& want) {
  const double squares =
      std::transform_reduce(got.begin(), got.end(), want.begin(), 0.0, std::plus(),
                            [](double a, double b) { return (a - b) * (a - b); });
  return std::sqrt(squares / static_cast<double>(got.size()));
}

// P that is rounded to bf16 before it is multiplied by dP - D, as that of narrow heads is, costs dQ
// and dK 1.2 times the error, with outliers up to 1.41 times.
TEST_F(GradientErrors, AreThoseOfRounding) {
  constexpr double kMax = 1.12, kMaxOfNarrow = 1.5;
  const Case plain{.dtype = DType::kBF16, .batch = 4, .sq = 200, .sk = 200};
  std::vector<Case> cases = {plain, plain, plain, plain};
  cases[0].mask = causal();
  cases[1].d = cases[1].dv = 128;
  cases[2].d = 192;
  cases[2].dv = 128;
  cases[2].mask = causal();
  cases[3].d = cases[3].dv = 256;
  for (const Case& c : cases) {
    for (const bool outliers : {false, true}) {
      Workload w(c, c.seed());
      w.options.engine = "cuda";
      if (outliers) {
        enlarge_outliers(w.forward.k, c.d);
        enlarge_outliers(w.forward.v, c.dv);
      }
      w.seal();
      const Outputs exact = expect(w).reference;
      const auto is_right = [&] {
        const Outputs near = rounded_gradients(w);
        testing::AssertionResult result = testing::AssertionSuccess();
        const auto check = [&](const char* name, const Tensor& got, const std::vector<double>& want,
                               const std::vector<double>& of_rounding) {
          const double ratio = rms_error(read(got), want) / rms_error(of_rounding, want);
          if (ratio < (c.d > 192 ? kMax : kMaxOfNarrow)) return;
          if (result) result = testing::AssertionFailure() << (outliers ? "with outliers" : "");
          result << " " << name << " has " << ratio << " times the error";
        };
        check("dQ", w.backward.dq, exact.dq, near.dq);
        check("dK", w.backward.dk, exact.dk, near.dk);
        check("dV", w.backward.dv, exact.dv, near.dv);
        return result;
      };
      std::set<std::string> seen;
      run_tiles<BackwardArgs>(
          w, w.backward, seen, [&] { w.run_forward(); }, is_right);
    }
  }
}

}  // namespace
}  // namespace fulgur::test
