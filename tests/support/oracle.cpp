#include "oracle.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "expression/call.h"
#include "reference/algorithms.h"
#include "reference/expressions.h"

namespace fulgur::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kHidingBias = -0x1p115;  // a bias below it counts as -inf

// One head of one sequence, gathered into dense double arrays.
struct HeadData {
  std::vector<double> q, k, v, dout, dlse;
  std::vector<double> bias;  // [sq, sk], empty without; -inf where a bool hides
  ValueAt score_value, mask_value;
  ScorePlace place;  // of the head

  ScorePlace at(int64_t i, int64_t j, double score) const {
    ScorePlace p = place;
    p.q = i;
    p.k = j;
    p.score = score;
    return p;
  }
  reference::Head head{};
  reference::OutputGradient gradient() const {
    return {dout.data(), dlse.empty() ? nullptr : dlse.data()};
  }
};

struct HeadResult {
  reference::Forward forward;
  reference::Backward backward;
  std::vector<double> ds;  // [sq, sk], the gradients of scores, of a head with a bias
};

// Largest sizes met, for the units of the error rule.
struct Sizes {
  double q = 0, k = 0, v = 0, dout = 0, ds = 0;
  double dsink = 0;                         // the sum of all terms
  double dsink_squares = 0;                 // of what of them has O in it
  std::vector<double> terms, of_rounded_o;  // [sq, sk]: those of ds, and what of them has O in it
  void include(const Sizes& other) {
    q = std::max(q, other.q);
    k = std::max(k, other.k);
    v = std::max(v, other.v);
    dout = std::max(dout, other.dout);
    ds = std::max(ds, other.ds);
  }
};

double max_abs(const std::vector<double>& values) {
  double size = 0;
  for (const double x : values) {
    if (std::isfinite(x)) size = std::max(size, std::fabs(x));
  }
  return size;
}

// Rows [begin, begin + rows) of head h of a tensor read as [rows][heads][dim].
std::vector<double> gather(const std::vector<double>& all, int64_t begin, int64_t rows,
                           int64_t heads, int64_t h, int64_t dim) {
  std::vector<double> part;
  part.reserve(static_cast<size_t>(rows * dim));
  for (int64_t r = begin; r < begin + rows; ++r) {
    const auto from = all.begin() + (r * heads + h) * dim;
    part.insert(part.end(), from, from + dim);
  }
  return part;
}

// Adds such rows to where they came from.
void scatter(std::vector<double>& all, const std::vector<double>& part, int64_t begin, int64_t rows,
             int64_t heads, int64_t h, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < dim; ++i) {
      all[static_cast<size_t>(((begin + r) * heads + h) * dim + i)] +=
          part[static_cast<size_t>(r * dim + i)];
    }
  }
}

// Attention as a framework without a fused kernel computes it, every intermediate in `dtype`.
// T (f32 or f64) is the type of the sums.
template <class T>
HeadResult naive_head(const HeadData& data, DType dtype, bool gradients, Sizes* sizes) {
  const reference::Head& h = data.head;
  const reference::Rule& rule = h.rule;
  const auto sq = h.sq, sk = h.sk, d = h.d, dv = h.dv;
  const auto scale = static_cast<T>(rule.scale), cap = static_cast<T>(rule.softcap);
  const kernels::DropoutMask& mask = rule.dropout.mask;
  const auto kept = static_cast<T>(1 / (1 - rule.dropout.p));
  const auto round = [dtype](T x) {
    return dtype == DType::kF32 || dtype == DType::kF64 ? x : static_cast<T>(rounded(x, dtype));
  };
  const std::vector<T> q(data.q.begin(), data.q.end()), k(data.k.begin(), data.k.end()),
      v(data.v.begin(), data.v.end()), dout(data.dout.begin(), data.dout.end());
  // Key-major copies, so that a row of S or dP is a sum of rows.
  std::vector<T> kt(k.size()), vt(v.size());
  for (int64_t j = 0; j < sk; ++j) {
    for (int64_t i = 0; i < d; ++i) kt[i * sk + j] = k[j * d + i];
    for (int64_t i = 0; i < dv; ++i) vt[i * sk + j] = v[j * dv + i];
  }
  std::vector<T> S(sk), P(sk), Z(sk), dP(sk), jacobian(sk), row(std::max(d, dv));
  std::vector<T> dK(k.size()), dV(v.size());
  HeadResult result;
  result.forward.o.resize(sq * dv);
  result.forward.lse.resize(sq, rule.sink);
  const auto sink = static_cast<T>(rule.sink);
  T dsink = 0;
  if (gradients) result.backward.dq.resize(sq * d);
  if (gradients && !data.bias.empty()) {
    for (auto* x : {&result.ds, &sizes->terms, &sizes->of_rounded_o}) x->resize(sq * sk);
  }
  std::vector<bool> hidden(sk);  // by the tree mask, the bias or an expression

  for (int64_t i = 0; i < sq; ++i) {
    std::fill(hidden.begin(), hidden.end(), false);
    for (int64_t token = 0; rule.tree != nullptr && token < sq; ++token) {
      const int64_t j = sk - sq + token;
      if (j >= 0) hidden[j] = (rule.tree[i] & uint64_t{1} << token) == 0;
    }
    for (int64_t j = 0; !data.bias.empty() && j < sk; ++j) {
      if (data.bias[i * sk + j] < kHidingBias) hidden[j] = true;
    }
    for (int64_t j = 0; data.mask_value && j < sk; ++j) {
      if (data.mask_value(data.at(i, j, 0)) == 0) hidden[j] = true;
    }
    const int64_t diagonal = rule.band.top_left ? i : i + sk - sq;
    int64_t begin = rule.band.left < 0 ? 0 : std::max<int64_t>(0, diagonal - rule.band.left);
    int64_t end = rule.band.right < 0 ? sk : std::min(sk, diagonal + rule.band.right + 1);
    if (rule.band.chunk > 0) {
      int64_t chunk = 0;  // where the diagonal's begins
      while (chunk > diagonal) chunk -= rule.band.chunk;
      while (chunk + rule.band.chunk <= diagonal) chunk += rule.band.chunk;
      begin = std::max(begin, chunk);
      end = std::min(end, chunk + rule.band.chunk);
    }
    const auto dlse = static_cast<T>(data.gradient().lse_of(i));
    if (std::count(hidden.begin() + begin, hidden.begin() + std::max(begin, end), false) == 0) {
      if (sink > -kInf) dsink += dlse;
      continue;
    }
    std::fill(S.begin(), S.end(), T{0});
    for (int64_t c = 0; c < d; ++c) {
      for (int64_t j = begin; j < end; ++j) S[j] += q[i * d + c] * kt[c * sk + j];
    }
    T m = sink, l = 0;
    for (int64_t j = begin; j < end; ++j) {
      S[j] = round(S[j] * scale);
      jacobian[j] = 1;
      if (cap > 0) {
        const T t = std::tanh(S[j] / cap);
        jacobian[j] = 1 - t * t;
        S[j] = round(cap * t);
      }
      if (rule.slope != 0) {
        S[j] = round(S[j] - static_cast<T>(rule.slope) * static_cast<T>(std::abs(diagonal - j)));
      }
      if (data.score_value && !hidden[j]) {
        const double x = S[j], step = 1e-9;  // so short that few bends lie in it
        jacobian[j] *= static_cast<T>((data.score_value(data.at(i, j, x + step)) -
                                       data.score_value(data.at(i, j, x - step))) /
                                      (2 * step));
        S[j] = round(static_cast<T>(data.score_value(data.at(i, j, x))));
      }
      if (!data.bias.empty()) S[j] = round(S[j] + static_cast<T>(data.bias[i * sk + j]));
      if (hidden[j]) S[j] = -std::numeric_limits<T>::infinity();
      m = std::max(m, S[j]);
    }
    for (int64_t j = begin; j < end; ++j) l += P[j] = std::exp(S[j] - m);
    const T e_sink = sink > -kInf ? std::exp(sink - m) : T{0};
    l += e_sink;
    for (int64_t j = begin; j < end; ++j) {
      P[j] = round(P[j] / l);
      Z[j] = rule.dropout.p == 0 ? T{1} : mask.keeps(rule.head_index, i, j) ? kept : T{0};
    }
    result.forward.lse[i] = m + std::log(l);

    std::fill(row.begin(), row.end(), T{0});
    for (int64_t j = begin; j < end; ++j) {
      if (hidden[j]) continue;
      const T p = Z[j] == 0 ? T{0} : round(P[j] * Z[j]);  // a dropped NaN is 0
      for (int64_t c = 0; c < dv; ++c) row[c] += p * v[j * dv + c];
    }
    T D = 0, size_of_d = 0, squares_of_d = 0;
    for (int64_t c = 0; c < dv; ++c) {
      const T o = round(row[c]);
      result.forward.o[i * dv + c] = o;
      D += dout[i * dv + c] * o;
      size_of_d += std::fabs(dout[i * dv + c] * o);
      squares_of_d += dout[i * dv + c] * o * dout[i * dv + c] * o;
    }
    if (!gradients) continue;

    const T p_sink = round(e_sink / l);
    if (p_sink > 0) dsink -= round(p_sink * (D - dlse));
    sizes->dsink += p_sink * (size_of_d + std::fabs(dlse));
    sizes->dsink_squares += p_sink * p_sink * squares_of_d;
    for (int64_t j = begin; j < end; ++j) {
      if (hidden[j]) continue;
      const T p = Z[j] == 0 ? T{0} : round(P[j] * Z[j]);  // a dropped NaN is 0
      for (int64_t c = 0; c < dv; ++c) dV[j * dv + c] += p * dout[i * dv + c];
    }
    std::fill(dP.begin(), dP.end(), T{0});
    for (int64_t c = 0; c < dv; ++c) {
      for (int64_t j = begin; j < end; ++j) dP[j] += dout[i * dv + c] * vt[c * sk + j];
    }
    std::fill(row.begin(), row.end(), T{0});
    for (int64_t j = begin; j < end; ++j) {
      if (hidden[j]) continue;
      const T dp = Z[j] == 0 ? T{0} : round(dP[j]) * Z[j];
      const T of_score = round(P[j] * (dp - (D - dlse))), dS = round(of_score * jacobian[j]);
      const double size = P[j] * (std::fabs(dp) + std::fabs(D) + std::fabs(dlse));
      sizes->ds = std::max(sizes->ds, size);
      if (!result.ds.empty()) {
        result.ds[i * sk + j] = of_score;
        sizes->terms[i * sk + j] = size;
        sizes->of_rounded_o[i * sk + j] = P[j] * std::sqrt(squares_of_d);
      }
      for (int64_t c = 0; c < d; ++c) {
        row[c] += dS * k[j * d + c];
        dK[j * d + c] += dS * q[i * d + c];
      }
    }
    for (int64_t c = 0; c < d; ++c) result.backward.dq[i * d + c] = round(row[c] * scale);
  }
  if (gradients) {
    for (const T x : dK) result.backward.dk.push_back(round(x * scale));
    for (const T x : dV) result.backward.dv.push_back(round(x));
    result.backward.dsink = dsink;
  }
  sizes->q = max_abs(data.q);
  sizes->k = max_abs(data.k);
  sizes->v = max_abs(data.v);
  sizes->dout = max_abs(data.dout);
  return result;
}

HeadResult reference_head(const HeadData& data, bool gradients) {
  HeadResult result{reference::standard_forward(data.head), {}, {}};
  if (!gradients) return result;
  if (!data.bias.empty()) result.ds.resize(data.bias.size());
  result.backward = reference::standard_backward(data.head, data.gradient(), nullptr,
                                                 {result.ds.data(), data.head.sk, 1});
  return result;
}

// body(n) for n < count on two threads.
template <class Body>
void parallel(int64_t count, Body body) {
  std::atomic<int64_t> next = 0;
  auto work = [&] {
    for (int64_t n; (n = next++) < count;) body(n);
  };
  std::jthread other(work);
  work();
}

// Which element of a bias of that shape the score of query i and key j takes.
int64_t element_of_bias(const std::array<int64_t, 4>& shape, int64_t b, int64_t h, int64_t i,
                        int64_t j) {
  const int64_t index[] = {b, h, i, j};
  int64_t element = 0;
  for (int n = 0; n < 4; ++n) element = element * shape[n] + (shape[n] == 1 ? 0 : index[n]);
  return element;
}

void accumulate(Outputs& all, const HeadResult& one, bool gradients, const Workload& w, size_t b,
                int64_t h) {
  const Case& c = w.c;
  const Rows& s = w.sequences[b];
  const int64_t hk = h / (c.hq / c.hk);
  scatter(all.out, one.forward.o, s.q_begin, s.sq, c.hq, h, c.dv);
  for (int64_t r = 0; r < s.sq; ++r) all.lse[w.lse_index(b, h, r)] = one.forward.lse[r];
  if (!gradients) return;
  scatter(all.dq, one.backward.dq, s.q_begin, s.sq, c.hq, h, c.d);
  scatter(all.dk, one.backward.dk, s.k_begin, s.sk, c.hk, hk, c.d);
  scatter(all.dv, one.backward.dv, s.k_begin, s.sk, c.hk, hk, c.dv);
  all.dsinks[h] += one.backward.dsink;
  for (size_t at = 0; at < one.ds.size(); ++at) {
    const int64_t i = static_cast<int64_t>(at) / s.sk, j = static_cast<int64_t>(at) % s.sk;
    all.dbias[element_of_bias(w.forward.bias.shape, b, h, i, j)] += one.ds[at];
  }
}

// The sizes of the terms that an element of dbias sums, of that with the largest sum.
void set_units_of_dbias(const Workload& w, const std::vector<Sizes>& sizes, Expected& e) {
  std::vector<double> terms(e.reference.dbias.size()), squares(terms.size());
  for (size_t n = 0; n < sizes.size(); ++n) {
    const auto b = static_cast<int64_t>(n) / w.c.hq, h = static_cast<int64_t>(n) % w.c.hq;
    const int64_t sk = w.sequences[b].sk;
    double of_row = 0;
    for (size_t at = 0; at < sizes[n].terms.size(); ++at) {
      const int64_t i = static_cast<int64_t>(at) / sk, j = static_cast<int64_t>(at) % sk;
      const int64_t to = element_of_bias(w.forward.bias.shape, b, h, i, j);
      terms[to] += sizes[n].terms[at];
      // All of a row are off by the same, where one element sums them.
      if (w.forward.bias.shape[3] > 1 || j == 0) of_row = 0;
      squares[to] -= of_row * of_row;
      of_row += sizes[n].of_rounded_o[at];
      squares[to] += of_row * of_row;
    }
  }
  e.unit.dbias = max_abs(terms);
  e.unit.rounded_dbias = std::sqrt(max_abs(squares));
}

Outputs empty_outputs(const Workload& w) {
  const Case& c = w.c;
  return {
      std::vector<double>(w.total_q * c.hq * c.dv), std::vector<double>(w.total_q * c.hq, -kInf),
      std::vector<double>(w.total_q * c.hq * c.d),  std::vector<double>(w.total_k * c.hk * c.d),
      std::vector<double>(w.total_k * c.hk * c.dv), std::vector<double>(c.hq),
      std::vector<double>(w.forward.bias.numel())};
}

Expected expect_some(const Workload& w, bool gradients) {
  const Case& c = w.c;
  const std::vector<double> q = read(w.forward.q), k = read(w.forward.k), v = read(w.forward.v),
                            dout = read(w.backward.dout);
  const std::vector<double> dlse = c.dlse ? read(w.backward.dlse) : std::vector<double>();
  std::vector<double> slopes, sinks(c.hq, -kInf);
  if (w.forward.alibi_slopes.given()) slopes = read(w.forward.alibi_slopes);
  if (w.forward.sinks.given()) sinks = read(w.forward.sinks);
  std::vector<double> bias;
  if (w.forward.bias.given()) bias = read(w.forward.bias);
  std::vector<uint64_t> tree(w.forward.tree_mask.numel());
  std::memcpy(tree.data(), w.forward.tree_mask.data, 8 * tree.size());
  const kernels::DropoutMask dropout =
      kernels::dropout_mask(kernels::dropout_threshold(w.options.dropout_p),
                            w.run_options.dropout_seed, w.run_options.dropout_offset);
  const double scale = w.options.scale.value_or(1 / std::sqrt(static_cast<double>(c.d)));
  const auto heads = static_cast<int64_t>(w.sequences.size()) * c.hq;
  std::vector<HeadResult> references(heads), naives(heads);
  std::vector<Sizes> sizes(heads);
  const expression::Expressions expressions(w.options, w.forward.tensors, {});
  const reference::PassExpressions of_pass(expressions.graph(gradients));
  std::vector<ConstTensor> tensors;
  for (const TensorBinding& t : expressions.bound(w.forward.tensors)) tensors.push_back(t.tensor);
  parallel(heads, [&](int64_t n) {
    const int64_t b = n / c.hq, h = n % c.hq, hk = h / (c.hq / c.hk);
    const Rows& s = w.sequences[b];
    HeadData data;
    data.q = gather(q, s.q_begin, s.sq, c.hq, h, c.d);
    data.k = gather(k, s.k_begin, s.sk, c.hk, hk, c.d);
    data.v = gather(v, s.k_begin, s.sk, c.hk, hk, c.dv);
    data.dout = gather(dout, s.q_begin, s.sq, c.hq, h, c.dv);
    for (int64_t r = 0; c.dlse && r < s.sq; ++r) data.dlse.push_back(dlse[w.lse_index(b, h, r)]);
    for (int64_t at = 0; !bias.empty() && at < s.sq * s.sk; ++at) {
      const double x = bias[element_of_bias(w.forward.bias.shape, b, h, at / s.sk, at % s.sk)];
      data.bias.push_back(w.forward.bias.dtype != DType::kBool ? x : x != 0 ? 0 : -kInf);
    }
    const int64_t q0 = c.packed() ? s.q_begin : 0;
    data.score_value = w.score_value;
    data.mask_value = w.mask_value;
    data.place = {.b = b, .h = h, .hk = hk, .sq = s.sq, .sk = s.sk, .q0 = q0};
    reference::HeadExpressions of_head(
        of_pass, tensors, {.b = b, .h = h, .hk = hk, .sq = s.sq, .sk = s.sk, .q0 = q0}, {});
    const auto slope = c.alibi == Alibi::kNone ? 0 : slopes[c.alibi == Alibi::kHeads ? h : n];
    const Options& o = w.options;
    data.head = {s.sq,
                 s.sk,
                 c.d,
                 c.dv,
                 data.q.data(),
                 data.k.data(),
                 data.v.data(),
                 {scale,
                  o.softcap,
                  slope,
                  sinks[h],
                  {o.mask.left, o.mask.right, o.mask.chunk, o.mask.top_left},
                  tree.empty() ? nullptr : tree.data() + s.q_begin,
                  {o.dropout_p, dropout},
                  static_cast<uint64_t>(n),
                  {data.bias.empty() ? nullptr : data.bias.data(), DType::kF64, 0, s.sk, 1},
                  expressions.given() ? &of_head : nullptr}};
    references[n] = reference_head(data, gradients);
    naives[n] = c.dtype == DType::kF64 ? naive_head<double>(data, c.dtype, gradients, &sizes[n])
                                       : naive_head<float>(data, c.dtype, gradients, &sizes[n]);
  });

  Expected e{empty_outputs(w), empty_outputs(w), {}};
  Sizes size;
  for (int64_t n = 0; n < heads; ++n) {
    accumulate(e.reference, references[n], gradients, w, n / c.hq, n % c.hq);
    accumulate(e.naive, naives[n], gradients, w, n / c.hq, n % c.hq);
    size.include(sizes[n]);
  }
  for (auto* sums : {&e.naive.dk, &e.naive.dv}) {  // sums over a group of heads are rounded again
    for (double& x : *sums) x = rounded(x, c.dtype);
  }
  const double kept = 1 / (1 - c.dropout);
  e.unit.out = kept * size.v;
  e.unit.lse = std::max(1.0, max_abs(e.reference.lse));
  e.unit.dq = std::max(max_abs(e.reference.dq), std::fabs(scale) * size.ds * size.k);
  e.unit.dk = std::max(max_abs(e.reference.dk), std::fabs(scale) * size.ds * size.q);
  e.unit.dv = std::max(max_abs(e.reference.dv), kept * size.dout);
  for (int64_t h = 0; h < c.hq; ++h) {
    double terms = 0, squares = 0;
    for (int64_t n = h; n < heads; n += c.hq) {
      terms += sizes[n].dsink;
      squares += sizes[n].dsink_squares;
    }
    e.unit.dsinks = std::max(e.unit.dsinks, terms);
    e.unit.rounded_dsinks = std::max(e.unit.rounded_dsinks, std::sqrt(squares));
  }
  if (gradients && !bias.empty()) set_units_of_dbias(w, sizes, e);
  return e;
}

}  // namespace

Expected expect(const Workload& w) { return expect_some(w, true); }
Expected expect_forward(const Workload& w) { return expect_some(w, false); }

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 32 * std::numeric_limits<double>::epsilon();
    case DType::kF32:
      return 32 * std::numeric_limits<float>::epsilon();
    default:
      return 1e-5;
  }
}

/// At most, of numbers of size 1.
double half_ulp(DType dtype) {
  return dtype == DType::kBF16  ? 0x1p-8
         : dtype == DType::kF16 ? 0x1p-11
         : dtype == DType::kF32 ? 0x1p-24
                                : 0x1p-53;
}

testing::AssertionResult within(const char* name, const Tensor& got,
                                const std::vector<double>& reference,
                                const std::vector<double>& naive, double factor, double bound) {
  const std::vector<double> values = read(got);
  if (values.size() != reference.size()) {
    return testing::AssertionFailure()
           << name << ": " << values.size() << " elements, want " << reference.size();
  }
  double naive_error = 0;
  for (size_t n = 0; n < naive.size(); ++n) {
    const double error = std::fabs(naive[n] - reference[n]);
    if (std::isfinite(error)) naive_error = std::max(naive_error, error);
  }
  for (size_t n = 0; n < values.size(); ++n) {
    const double x = values[n], want = reference[n];
    // To round the result alone may take half an ulp, however lucky the naive computation was.
    const double most =
        bound + factor * std::max(naive_error, half_ulp(got.dtype) * std::fabs(want));
    const bool right = std::isnan(want)   ? std::isnan(x)
                       : std::isinf(want) ? x == want
                                          : std::fabs(x - want) <= most;
    if (!right) {
      return testing::AssertionFailure()
             << name << " " << got.describe() << ": element " << n << " is " << x << ", want "
             << want << " within " << most << " (naive error " << naive_error << ")";
    }
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult forward_is_right(const Workload& w, const Expected& e) {
  const double t = tolerance(w.c.dtype);
  if (auto result = within("out", w.forward.out, e.reference.out, e.naive.out, 2, t * e.unit.out);
      !result) {
    return result;
  }
  return within("lse", w.forward.lse, e.reference.lse, {}, 0, t * e.unit.lse);
}

testing::AssertionResult forward_is_close(const Workload& w, const Expected& e) {
  const double scores = 4 * std::numeric_limits<float>::epsilon() * e.unit.lse;
  const double bound = (2 * half_ulp(w.c.dtype) + scores) * e.unit.out;
  if (auto r = within("out", w.forward.out, e.reference.out, {}, 0, bound); !r) return r;
  return within("lse", w.forward.lse, e.reference.lse, {}, 0, tolerance(w.c.dtype) * e.unit.lse);
}

testing::AssertionResult backward_is_right(const Workload& w, const Expected& e) {
  const double t = tolerance(w.c.dtype);
  const BackwardArgs& b = w.backward;
  if (auto r = within("dq", b.dq, e.reference.dq, e.naive.dq, 3, t * e.unit.dq); !r) return r;
  if (auto r = within("dk", b.dk, e.reference.dk, e.naive.dk, 3, t * e.unit.dk); !r) return r;
  if (auto r = within("dv", b.dv, e.reference.dv, e.naive.dv, 3, t * e.unit.dv); !r) return r;
  if (b.dbias.given()) {
    const double bound = std::max(t, tolerance(DType::kF32)) * e.unit.dbias +
                         half_ulp(w.c.dtype) * e.unit.rounded_dbias;
    if (auto r = within("dbias", b.dbias, e.reference.dbias, e.naive.dbias, 3, bound); !r) return r;
  }
  if (!b.dsinks.given()) return testing::AssertionSuccess();
  // They are f32 whatever the tensors are, but take D from O, which is rounded as these are.
  const double bound = std::max(t, tolerance(DType::kF32)) * e.unit.dsinks +
                       half_ulp(w.c.dtype) * e.unit.rounded_dsinks +
                       half_ulp(b.dsinks.dtype) * max_abs(e.reference.dsinks);
  return within("dsinks", b.dsinks, e.reference.dsinks, e.naive.dsinks, 3, bound);
}

}  // namespace fulgur::test
