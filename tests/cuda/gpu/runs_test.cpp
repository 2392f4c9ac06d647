// The same call 200 times: the same bits, but for dQ where blocks of keys add to it in any order,
// which stays within the bound of that.
#include <algorithm>
#include <cmath>

#include "../plans/dynamic_decode.h"
#include "cached.h"
#include "device.h"
#include "engine_memory.h"

namespace fulgur::test {
namespace {

using ManyRuns = OnGpu;

constexpr int kRuns = 200;

// Another call on a stream of its own, so that the runs with it meet other neighbours each time.
class Neighbour {
 public:
  Neighbour() : plan_(plan(call_.args(), {.engine = "cuda"})) {}
  ~Neighbour() { stream_.synchronize(); }
  void run(int times) const {
    for (int i = 0; i < times; ++i) plan_.run(call_.args(), stream_.run());
  }

 private:
  Stream stream_;
  DeviceCall call_{1, 300, 300, 3, 64};
  Plan plan_;
};

std::vector<Tensor> results_of(const Workload& w, bool backward) {
  std::vector<Tensor> results = {w.forward.out, w.forward.lse};
  if (backward) results.insert(results.end(), {w.backward.dq, w.backward.dk, w.backward.dv});
  return results;
}

std::vector<std::vector<std::byte>> bits_of(const std::vector<Tensor>& results) {
  std::vector<std::vector<std::byte>> all;
  for (const Tensor& t : results) all.push_back(bits(t));
  return all;
}

// Runs a case so often; `check` looks at its tensors after each run but the first, `begin` after
// that one.
template <class Begin, class Check>
void run_often(Workload& w, bool backward, Begin begin, Check check) {
  const Neighbour neighbour;
  w.options.engine = "cuda";
  for (int run = 0; run < kRuns && !testing::Test::HasFatalFailure(); ++run) {
    SCOPED_TRACE(run);
    w.seal();
    neighbour.run(run % 5);
    w.run_forward();
    if (backward) w.run_backward();
    if (run == 0) {
      begin();
    } else {
      check();
    }
  }
}

void keeps_its_bits(Workload& w, bool backward) {
  w.options.deterministic = backward;
  std::vector<std::vector<std::byte>> first;
  run_often(
      w, backward, [&] { first = bits_of(results_of(w, backward)); },
      [&] { ASSERT_EQ(bits_of(results_of(w, backward)), first); });
}

void keeps_its_bits(const Case& c, bool backward) {
  SCOPED_TRACE(c.name());
  Workload w(c, c.seed());
  keeps_its_bits(w, backward);
}

TEST_F(ManyRuns, KeepTheBitsOfTheForwardPass) {
  const Case prefill{
      .dtype = DType::kBF16, .sq = 300, .sk = 400, .hq = 2, .d = 128, .mask = causal()};
  Case split = prefill;  // few heads: tiles share the keys of a block out
  split.sk = 4000;
  Case packed = prefill;
  packed.layout = Layout::kPacked;
  for (const Case& c : {prefill, split, packed}) keeps_its_bits(c, false);
}

TEST_F(ManyRuns, KeepTheBitsOfDecode) {
  for (const int64_t sq : {1, 4, 8, 16}) {  // of 8 heads: the warp path, one and two warpgroups
    for (const int64_t d : {64, 128}) {
      keeps_its_bits({.dtype = DType::kBF16,
                      .batch = 2,
                      .sq = sq,
                      .sk = 1500,
                      .hq = 16,
                      .hk = 2,
                      .d = d,
                      .dv = d,
                      .mask = causal(),
                      .seqused = true},
                     false);
    }
  }
}

// Pages in a random order: few q blocks of few and many rows, of more sequences than a warp has
// lanes, as many q blocks as CTAs, and q blocks of unequal lengths.
TEST_F(ManyRuns, KeepTheBitsOfDecodeOverPages) {
  struct Shape {
    int64_t batch, sq, hk;
  };
  for (const auto& [batch, sq, hk] :
       {Shape{2, 1, 4}, {4, 4, 4}, {4, 16, 4}, {40, 4, 1}, {64, 1, 2}, {66, 4, 2}}) {
    Workload w({.dtype = DType::kBF16,
                .batch = batch,
                .sq = sq,
                .sk = 500,
                .hq = 8 * hk,
                .hk = hk,
                .d = 128,
                .dv = 128,
                .mask = causal(),
                .seqused = true},
               7);
    w.options.engine = "cuda";
    Cached cached(w, {CacheShape::Order::kNhd, CacheShape::Index::kTable, 16}, 8);
    const Neighbour neighbour;
    std::vector<std::vector<std::byte>> first;
    for (int run = 0; run < kRuns; ++run) {
      w.seal();
      neighbour.run(run % 5);
      cached.run_forward();
      const auto now = bits_of(results_of(w, false));
      if (run == 0) first = now;
      ASSERT_EQ(now, first) << batch << " sequences, " << sq << " queries, run " << run;
    }
  }
}

// The dynamic schedule, of the warp path and of the warpgroup path, with a q block of many splits:
// whichever CTAs have them, and combine them. The bits are right, too.
TEST_F(ManyRuns, KeepTheBitsOfTheDynamicSchedule) {
  for (const int64_t sq : {1, 16}) {
    SCOPED_TRACE(sq);
    std::vector<Rows> rows(250, {0, 0, sq, 600});
    rows[3].sk = 30000;
    Workload w({.dtype = DType::kBF16,
                .sq = sq,
                .sk = 30000,
                .hq = 8,
                .hk = 1,
                .d = 64,
                .dv = 64,
                .mask = causal(),
                .layout = Layout::kPacked},
               5, rows);
    w.options.engine = "cuda";
    const Neighbour neighbour;
    const Expected e = expect_forward(w);
    std::vector<std::vector<std::byte>> first;
    run_dynamic_plans(w.forward, w.options, kRuns, [&](int run) {
      neighbour.run(run % 5);
      if (run == 0) {
        ASSERT_TRUE(forward_is_right(w, e));
        first = bits_of(results_of(w, false));
      }
      ASSERT_EQ(bits_of(results_of(w, false)), first);
    });
  }
}

TEST_F(ManyRuns, KeepTheBitsOfDeterministicGradients) {
  for (const int64_t d : {64, 128, 256}) {
    keeps_its_bits({.dtype = DType::kBF16,
                    .sq = 500,
                    .sk = 700,
                    .hq = 4,
                    .hk = 2,
                    .d = d,
                    .dv = d,
                    .mask = causal()},
                   true);
  }
}

// The sums of the sizes of the terms of dQ[i][c] = scale sum_j dS[i][j] K[j][c], of one head.
std::vector<double> sizes_of_dq(const Workload& w) {
  const int64_t sq = w.c.sq, sk = w.c.sk, d = w.c.d;
  const std::vector<double> q = read(w.forward.q), k = read(w.forward.k), v = read(w.forward.v);
  const std::vector<double> dout = read(w.backward.dout);
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  const auto dot = [&](const std::vector<double>& x, int64_t i, const std::vector<double>& y,
                       int64_t j) {
    double sum = 0;
    for (int64_t c = 0; c < d; ++c)
      sum += x[static_cast<size_t>(i * d + c)] * y[static_cast<size_t>(j * d + c)];
    return sum;
  };
  std::vector<double> sizes(static_cast<size_t>(sq * d));
  std::vector<double> P(static_cast<size_t>(sk)), dP(P.size());
  for (int64_t i = 0; i < sq; ++i) {
    double sum = 0, D = 0;
    for (size_t j = 0; j < P.size(); ++j) {
      P[j] = std::exp(scale * dot(q, i, k, static_cast<int64_t>(j)));
      dP[j] = dot(dout, i, v, static_cast<int64_t>(j));
      sum += P[j];
      D += P[j] * dP[j];
    }
    for (size_t j = 0; j < P.size(); ++j) {
      const double dS = P[j] / sum * (dP[j] - D / sum);
      for (int64_t c = 0; c < d; ++c) {
        sizes[static_cast<size_t>(i * d + c)] +=
            scale * std::fabs(dS * k[j * static_cast<size_t>(d) + static_cast<size_t>(c)]);
      }
    }
  }
  return sizes;
}

// A sum of n numbers in f32 is off by less than n 2^-24 of the sum of their sizes, whatever their
// order, and is then rounded to bf16.
TEST_F(ManyRuns, KeepTheSumsOfDqWithinTheirBound) {
  for (const int64_t d : {64, 128}) {
    const Case c{.dtype = DType::kBF16, .sq = 300, .sk = 6000, .hq = 1, .hk = 1, .d = d, .dv = d};
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    const std::vector<double> sizes = sizes_of_dq(w);
    const double blocks = static_cast<double>(c.sk) / 64;
    std::vector<std::vector<std::byte>> first;
    std::vector<double> dq;
    run_often(
        w, true,
        [&] {
          first = bits_of({w.forward.out, w.forward.lse, w.backward.dk, w.backward.dv});
          dq = read(w.backward.dq);
        },
        [&] {
          ASSERT_EQ(bits_of({w.forward.out, w.forward.lse, w.backward.dk, w.backward.dv}), first);
          const std::vector<double> now = read(w.backward.dq);
          for (size_t i = 0; i < dq.size(); ++i) {
            const double rounding = std::ldexp(std::max(std::fabs(dq[i]), std::fabs(now[i])), -7);
            ASSERT_NEAR(now[i], dq[i], rounding + 2 * blocks * std::ldexp(sizes[i], -24)) << i;
          }
        });
  }
}

}  // namespace
}  // namespace fulgur::test
