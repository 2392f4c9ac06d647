/// The reference algorithms: each against standard attention, gradients against finite differences,
/// the invariants of softmax, and the papers' claims about memory traffic.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/host_device/dropout.h"
#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "reference/sink.h"

namespace fulgur::reference {
namespace {

using namespace kernels;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kFastMemories[] = {1, 37, 256, 100000};

std::vector<double> normal(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> distribution;
  std::vector<double> x(n);
  for (double& value : x) value = distribution(random);
  return x;
}

struct Shape {
  int64_t sq, sk, d, dv;
};

/// A head that owns its data.
struct Sample {
  Sample(Shape s, const Rule& rule, uint64_t seed = 1)
      : shape(s),
        rule(rule),
        q(normal(s.sq * s.d, seed)),
        k(normal(s.sk * s.d, seed + 1)),
        v(normal(s.sk * s.dv, seed + 2)),
        dout(normal(s.sq * s.dv, seed + 3)),
        dlse(normal(s.sq, seed + 4)) {}
  Head head() const {
    return {shape.sq, shape.sk, shape.d, shape.dv, q.data(), k.data(), v.data(), rule};
  }
  OutputGradient gradient() const { return {dout.data(), dlse.data()}; }

  Shape shape;
  Rule rule;
  std::vector<double> q, k, v, dout, dlse;
};

Dropout dropout_of(double p, uint64_t seed, uint64_t offset) {
  return {p, dropout_mask(dropout_threshold(p), seed, offset)};
}

struct NamedRule {
  const char* name;
  Rule rule;
};

std::vector<NamedRule> rules() {
  const Dropout dropout = dropout_of(0.3, 0x123456789abcdef0, 0xfedcba9876543210);
  return {
      {"full", {}},
      {"scale", {.scale = 0.25}},
      {"causal", {.scale = 0.5, .band = {-1, 0}}},
      {"window", {.scale = 0.5, .band = {2, 1}}},
      {"diagonal", {.band = {0, 0}}},
      {"left", {.band = {3, -1}}},
      {"chunks", {.band = {-1, -1, 5}}},
      {"causal chunks", {.scale = 0.5, .band = {-1, 0, 4}}},
      {"chunks and window", {.sink = 0.2, .band = {3, 1, 7}}},
      {"chunks of one", {.band = {-1, -1, 1}}},
      {"softcap", {.scale = 0.7, .softcap = 1.5}},
      {"alibi", {.scale = 0.7, .slope = 0.3}},
      {"sink", {.scale = 0.7, .sink = 0.4}},
      {"sink far above", {.sink = 700}},
      {"sink far below", {.scale = 0.5, .sink = -700, .band = {2, 1}}},
      {"dropout", {.dropout = dropout, .head_index = 5}},
      {"all",
       {.scale = 0.6,
        .softcap = 2,
        .slope = 0.1,
        .sink = -0.5,
        .band = {6, 2},
        .dropout = dropout,
        .head_index = uint64_t{1} << 40}},
  };
}

const Shape kShapes[] = {{1, 1, 1, 1},   {5, 7, 4, 3},   {7, 5, 3, 8},  {16, 16, 8, 8},
                         {17, 33, 5, 6}, {33, 20, 8, 8}, {1, 50, 2, 9}, {9, 1, 7, 2},
                         {0, 4, 3, 2},   {4, 0, 3, 2},   {0, 0, 1, 1}};

/// Every element within a relative-plus-absolute tolerance; infinities and NaN never pass but for
/// -inf against -inf.
void expect_close(const std::vector<double>& got, const std::vector<double>& want,
                  const std::string& what, double tolerance = 1e-11) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t n = 0; n < got.size(); ++n) {
    if (want[n] == -kInf && got[n] == -kInf) continue;
    ASSERT_TRUE(std::abs(got[n] - want[n]) <= tolerance * (1 + std::abs(want[n])))
        << what << "[" << n << "]: got " << got[n] << ", want " << want[n];
  }
}

void expect_close(const Forward& got, const Forward& want, const std::string& what) {
  expect_close(got.o, want.o, what + " O");
  expect_close(got.lse, want.lse, what + " LSE");
}

void expect_close(const Backward& got, const Backward& want, const std::string& what) {
  expect_close(got.dq, want.dq, what + " dQ");
  expect_close(got.dk, want.dk, what + " dK");
  expect_close(got.dv, want.dv, what + " dV");
  expect_close({got.dsink}, {want.dsink}, what + " dsink");
}

Forward with_lse(const Flash1Forward& forward) {
  Forward out{forward.o, forward.m};
  for (size_t i = 0; i < out.lse.size(); ++i) out.lse[i] += std::log(forward.l[i]);
  return out;
}

struct NamedForward {
  std::string name;
  Forward result;
};
struct NamedBackward {
  std::string name;
  Backward result;
};

/// Every algorithm but the standard one, over several fast memories.
std::vector<NamedForward> all_forward(const Head& h) {
  std::vector<NamedForward> all{{"memory-efficient", memory_efficient_forward(h)}};
  for (const int64_t M : kFastMemories) {
    const std::string suffix = ", M = " + std::to_string(M);
    all.push_back({"FlashAttention" + suffix, with_lse(flash1_forward(h, M))});
    all.push_back({"FlashAttention-2" + suffix, flash2_forward(h, M)});
    all.push_back({"split-KV" + suffix, split_kv_forward(h, 3, M)});
  }
  return all;
}

std::vector<NamedBackward> all_backward(const Head& h, const OutputGradient& dout) {
  std::vector<NamedBackward> all{
      {"memory-efficient", memory_efficient_backward(h, memory_efficient_forward(h), dout)}};
  for (const int64_t M : kFastMemories) {
    const std::string suffix = ", M = " + std::to_string(M);
    all.push_back({"FlashAttention" + suffix, flash1_backward(h, flash1_forward(h, M), dout, M)});
    all.push_back({"FlashAttention-2" + suffix, flash2_backward(h, flash2_forward(h, M), dout, M)});
  }
  return all;
}

// ---------------------------------------------------------------------------- Philox and dropout

TEST(Philox, KnownVectors) {
  constexpr u32 ones = 0xffffffff;
  static_assert(philox({0, 0, 0, 0}, {0, 0}) ==
                PhiloxWords{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}),
            (PhiloxWords{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxWords{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, KeepRule) {
  const uint64_t seed = 0x1111222233334444, offset = 0x5555666677778888;
  const uint64_t head = 0x0000000900000007;
  const PhiloxWords k = philox({0x77778888, 0x55556666, 0, 0}, {0x33334444, 0x11112222});
  const DropoutMask mask = dropout_mask(0x40000000u, seed, offset);
  int kept = 0;
  for (uint64_t i : {uint64_t{0}, uint64_t{3}, uint64_t{0xffffffff}}) {
    for (uint64_t j = 0; j < 4096; j += 4) {
      const auto group = static_cast<u32>(j / 4);
      const PhiloxWords words = philox({group, static_cast<u32>(i), 7, 9}, {k[0], k[1]});
      EXPECT_EQ(mask.words(head, i, j + 3), words);
      for (int n = 0; n < 4; ++n) {
        ASSERT_EQ(mask.keeps(head, i, j + n), words[n] >= 0x40000000u);
        kept += words[n] >= 0x40000000u;
      }
    }
  }
  EXPECT_NEAR(kept / (3 * 4096.0), 0.75, 0.02);  // five standard deviations
}

// Checkpoints and other engines rely on these bits.
TEST(Philox, KnownMasks) {
  const auto mask_of = [](double p, uint64_t seed, uint64_t offset, uint64_t head) {
    const DropoutMask mask = dropout_mask(dropout_threshold(p), seed, offset);
    std::vector<u32> rows;
    for (const uint64_t i : {0u, 1u, 65u, 4294967295u}) {
      rows.push_back(0);
      for (int j = 0; j < 32; ++j) rows.back() |= u32{mask.keeps(head, i, 100 + j)} << j;
    }
    return rows;
  };
  EXPECT_EQ(mask_of(0.3, 77, 5, 3),
            (std::vector<u32>{0xd3fb7bff, 0x46cfe57e, 0xd73cb5d6, 0xe5be0ef9}));
  EXPECT_EQ(mask_of(0.5, 0xfedcba9876543210, 0x0123456789abcdef, 0x500000002),
            (std::vector<u32>{0xdd9d1e49, 0x956b3393, 0xd8293fff, 0x66fdac32}));
}

TEST(Philox, Thresholds) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000u);
  EXPECT_EQ(dropout_threshold(0.6 / 4294967296.0), 1u);
  EXPECT_EQ(dropout_threshold(std::nextafter(1.0, 0.0)), 0xffffffffu);
  // An entry whose word equals the threshold is kept.
  const u32 word = dropout_mask(0, 1, 2).words(3, 4, 5)[5 % 4];
  EXPECT_TRUE(dropout_mask(word, 1, 2).keeps(3, 4, 5));
  EXPECT_FALSE(dropout_mask(word + 1, 1, 2).keeps(3, 4, 5));
}

TEST(Dropout, LeavesLseAndTheMeanOfO) {
  Sample sample({3, 9, 4, 4}, {.scale = 0.5});
  const Forward plain = standard_forward(sample.head());
  std::vector<double> mean(plain.o.size());
  const int seeds = 20000;
  for (int seed = 0; seed < seeds; ++seed) {
    sample.rule.dropout = dropout_of(0.4, seed, 0);
    const Forward dropped = flash2_forward(sample.head(), 64);
    expect_close(dropped.lse, plain.lse, "LSE");
    for (size_t n = 0; n < mean.size(); ++n) mean[n] += dropped.o[n] / seeds;
  }
  expect_close(mean, plain.o, "mean of O", 0.03);
}

// ------------------------------------------------------------------------- against each other

TEST(Forward, EveryAlgorithmEqualsStandard) {
  for (const auto& [name, rule] : rules()) {
    for (const Shape& shape : kShapes) {
      const Sample sample(shape, rule);
      const Forward want = standard_forward(sample.head());
      for (const auto& [algorithm, got] : all_forward(sample.head())) {
        SCOPED_TRACE(std::string(name) + ", sq = " + std::to_string(shape.sq) +
                     ", sk = " + std::to_string(shape.sk));
        expect_close(got, want, algorithm);
      }
    }
  }
}

TEST(Backward, EveryAlgorithmEqualsStandard) {
  for (const auto& [name, rule] : rules()) {
    for (const Shape& shape : kShapes) {
      const Sample sample(shape, rule);
      for (const OutputGradient& given : {OutputGradient{sample.dout.data()}, sample.gradient()}) {
        const Backward want = standard_backward(sample.head(), given);
        for (const auto& [algorithm, got] : all_backward(sample.head(), given)) {
          SCOPED_TRACE(std::string(name) + ", sq = " + std::to_string(shape.sq) +
                       ", sk = " + std::to_string(shape.sk));
          expect_close(got, want, algorithm);
        }
      }
    }
  }
}

/// Two keys by hand: the meaning of the rule itself, which the comparisons above cannot see.
TEST(Forward, ByHand) {
  const double q[] = {2}, k[] = {3, -1}, v[] = {10, 20};
  Head h{1, 2, 1, 1, q, k, v, {.scale = 0.5, .softcap = 4, .slope = 0.25}};
  // The one query is aligned with the last key: distances 1 and 0.
  const double s0 = 4 * std::tanh(3 / 4.0) - 0.25, s1 = 4 * std::tanh(-1 / 4.0);
  const double l = std::exp(s0) + std::exp(s1);
  const Forward both = standard_forward(h);
  EXPECT_NEAR(both.lse[0], std::log(l), 1e-14);
  EXPECT_NEAR(both.o[0], (10 * std::exp(s0) + 20 * std::exp(s1)) / l, 1e-13);
  h.rule.band = {0, 0};  // the last key alone
  EXPECT_NEAR(standard_forward(h).lse[0], s1, 1e-14);
  EXPECT_NEAR(standard_forward(h).o[0], 20, 1e-13);
}

TEST(Forward, SinkByHand) {
  const double q[] = {2}, k[] = {3, -1}, v[] = {10, 20};
  const Head h{1, 2, 1, 1, q, k, v, {.scale = 0.5, .softcap = 4, .slope = 0.25, .sink = 1.5}};
  const double s0 = 4 * std::tanh(3 / 4.0) - 0.25, s1 = 4 * std::tanh(-1 / 4.0);
  const double l = std::exp(s0) + std::exp(s1) + std::exp(1.5);
  const Forward one = standard_forward(h);
  EXPECT_NEAR(one.lse[0], std::log(l), 1e-14);
  EXPECT_NEAR(one.o[0], (10 * std::exp(s0) + 20 * std::exp(s1)) / l, 1e-13);
}

/// What the definition says of every number that a sink may be, and of rows that see no key.
TEST(Forward, SinksThatAreNoNumbers) {
  Sample sample({7, 5, 4, 3}, {.band = {-1, 0}});  // the first two rows see no key
  const Forward without = standard_forward(sample.head());
  for (const double sink : {-kInf, kInf, kNan, 0.5}) {
    sample.rule.sink = sink;
    std::vector<NamedForward> all = all_forward(sample.head());
    all.push_back({"standard", standard_forward(sample.head())});
    for (const auto& [algorithm, got] : all) {
      SCOPED_TRACE(algorithm + ", sink " + std::to_string(sink));
      if (sink == -kInf) expect_close(got, without, algorithm);
      for (int64_t i = 0; i < 7; ++i) {
        if (std::isnan(sink)) {
          EXPECT_TRUE(std::isnan(got.lse[i]));
        } else if (i < 2 || sink == kInf) {
          EXPECT_EQ(got.lse[i], sink);
        }
        for (int64_t c = i * 3; c < i * 3 + 3; ++c) {
          if (std::isnan(sink) && i >= 2) {
            EXPECT_TRUE(std::isnan(got.o[c]));
          } else if (i < 2 || sink == kInf) {
            EXPECT_EQ(got.o[c], 0);
          }
        }
      }
    }
  }
}

/// The gradient of an infinite sink is that of the LSE, which it is; -inf has none.
TEST(Backward, SinksThatAreInfinite) {
  Sample sample({7, 5, 4, 3}, {.band = {-1, 0}});
  const double sum = std::accumulate(sample.dlse.begin(), sample.dlse.end(), 0.0);
  for (const double sink : {-kInf, kInf}) {
    sample.rule.sink = sink;
    std::vector<NamedBackward> all = all_backward(sample.head(), sample.gradient());
    all.push_back({"standard", standard_backward(sample.head(), sample.gradient())});
    for (const auto& [algorithm, got] : all) {
      SCOPED_TRACE(algorithm + ", sink " + std::to_string(sink));
      expect_close({got.dsink}, {sink > 0 ? sum : 0}, "dsink");
      if (sink > 0) expect_close(got.dq, std::vector<double>(got.dq.size()), "dQ");
    }
  }
}

// ------------------------------------------------------------------------ finite differences

TEST(Backward, FiniteDifferences) {
  for (const auto& [name, rule] : rules()) {
    for (const Shape& shape : {Shape{5, 7, 4, 3}, Shape{6, 4, 3, 5}}) {
      SCOPED_TRACE(name);
      Sample sample(shape, rule);
      const Backward grad = standard_backward(sample.head(), sample.gradient());
      const auto loss = [&] {
        const Forward out = standard_forward(sample.head());
        double sum = std::inner_product(out.o.begin(), out.o.end(), sample.dout.begin(), 0.0);
        for (int64_t i = 0; i < shape.sq; ++i) {
          if (out.lse[i] != -kInf) sum += sample.dlse[i] * out.lse[i];
        }
        return sum;
      };
      const auto difference = [&](double& value) {
        const double step = 1e-5, saved = value;
        value = saved + step;
        const double up = loss();
        value = saved - step;
        const double down = loss();
        value = saved;
        return (up - down) / (2 * step);
      };
      const auto differences = [&](std::vector<double>& x) {
        std::vector<double> slope;
        for (double& value : x) slope.push_back(difference(value));
        return slope;
      };
      expect_close(grad.dq, differences(sample.q), "dQ", 1e-8);
      expect_close(grad.dk, differences(sample.k), "dK", 1e-8);
      expect_close(grad.dv, differences(sample.v), "dV", 1e-8);
      if (rule.sink == -kInf) continue;
      expect_close({grad.dsink}, {difference(sample.rule.sink)}, "dsink", 1e-7);
    }
  }
}

// ---------------------------------------------------------------------------------- invariants

TEST(Forward, ShiftOfScoresShiftsLseAlone) {
  // One more column, 1 in Q and `shift` in K, adds `shift` to every score.
  const Shape narrow{9, 13, 4, 5}, wide{9, 13, 5, 5};
  for (const double shift : {-700.0, 3.5, 700.0}) {
    Sample sample(wide, {});
    for (int64_t i = 0; i < wide.sq; ++i) sample.q[i * 5 + 4] = 1;
    for (int64_t j = 0; j < wide.sk; ++j) sample.k[j * 5 + 4] = shift;
    Sample unshifted(narrow, {});
    for (int64_t i = 0; i < narrow.sq; ++i) {
      std::copy_n(&sample.q[i * 5], 4, &unshifted.q[i * 4]);
    }
    for (int64_t j = 0; j < narrow.sk; ++j) {
      std::copy_n(&sample.k[j * 5], 4, &unshifted.k[j * 4]);
    }
    unshifted.v = sample.v;
    Forward want = standard_forward(unshifted.head());
    for (double& lse : want.lse) lse += shift;
    for (const auto& [algorithm, got] : all_forward(sample.head())) {
      expect_close(got, want, algorithm);
    }
  }
}

TEST(Forward, OrderOfKeysDoesNotMatter) {
  const Sample sample({9, 31, 4, 5}, {.scale = 0.5, .softcap = 3});
  const Shape& s = sample.shape;
  std::vector<int64_t> order(s.sk);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(7));
  Sample permuted = sample;
  for (int64_t j = 0; j < s.sk; ++j) {
    std::copy_n(&sample.k[order[j] * s.d], s.d, &permuted.k[j * s.d]);
    std::copy_n(&sample.v[order[j] * s.dv], s.dv, &permuted.v[j * s.dv]);
  }
  const Forward want = standard_forward(sample.head());
  for (const auto& [algorithm, got] : all_forward(permuted.head())) {
    expect_close(got, want, algorithm);
  }
}

TEST(Combine, AnySplitEqualsTheWhole) {
  std::mt19937_64 random(11);
  for (const auto& [name, rule] : rules()) {
    SCOPED_TRACE(name);
    const Sample sample({13, 29, 4, 5}, rule);
    const Head h = sample.head();
    const Forward want = standard_forward(h);
    for (int64_t splits = 1; splits <= h.sk + 3; ++splits) {  // some parts are empty at the end
      expect_close(split_kv_forward(h, splits, 64), want, std::to_string(splits) + " splits");
    }
    for (int trial = 0; trial < 20; ++trial) {  // uneven parts, in any order, combined in two steps
      std::vector<int64_t> cuts{0, h.sk};
      for (int n = 0; n < 4; ++n) cuts.push_back(random() % (h.sk + 1));
      std::sort(cuts.begin(), cuts.end());
      std::vector<Forward> parts;
      for (size_t n = 0; n + 1 < cuts.size(); ++n) {
        parts.push_back(flash2_forward_keys(h, cuts[n], cuts[n + 1], 64));
      }
      std::shuffle(parts.begin(), parts.end(), random);
      Forward whole =
          combine({combine({parts[0], parts[1]}), combine({parts[2], parts[3], parts[4]})});
      join_sink(h, whole);
      expect_close(whole, want, "uneven parts");
    }
  }
}

// -------------------------------------------------------------------------- rows and keys unseen

TEST(Forward, RowThatSeesNoKey) {
  Sample sample({7, 4, 3, 2}, {.band = {-1, 0}});  // queries 0, 1, 2 are before every key
  std::fill_n(sample.dlse.begin(), 3, kNan);
  const Forward standard = standard_forward(sample.head());
  auto all = all_forward(sample.head());
  all.push_back({"standard", standard});
  for (const auto& [algorithm, got] : all) {
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(got.lse[i], -kInf) << algorithm;
      for (int64_t c = 0; c < 2; ++c) EXPECT_EQ(got.o[i * 2 + c], 0) << algorithm;
    }
    EXPECT_TRUE(std::isfinite(got.lse[3])) << algorithm;
  }
  auto gradients = all_backward(sample.head(), sample.gradient());
  gradients.push_back({"standard", standard_backward(sample.head(), sample.gradient())});
  for (const auto& [algorithm, grad] : gradients) {
    for (int64_t n = 0; n < 3 * 3; ++n) EXPECT_EQ(grad.dq[n], 0) << algorithm;
    for (const double value : grad.dk) EXPECT_TRUE(std::isfinite(value)) << algorithm;
  }
}

TEST(Forward, NoKeysAtAll) {
  const Sample sample({4, 0, 3, 2}, {});
  for (const auto& [algorithm, got] : all_forward(sample.head())) {
    EXPECT_EQ(got.o, std::vector<double>(8, 0.0)) << algorithm;
    EXPECT_EQ(got.lse, std::vector<double>(4, -kInf)) << algorithm;
  }
}

TEST(Mask, UnseenKeysMayHoldAnything) {
  const Rule window{.band = {2, 0},
                    .dropout = dropout_of(0.2, 1, 2)};  // keys 0 .. 5 are seen by no query
  const Sample clean({4, 12, 3, 2}, window);
  for (const double poison : {kNan, kInf, -kInf}) {
    Sample bad = clean;
    std::fill_n(bad.k.begin(), 6 * 3, poison);
    std::fill_n(bad.v.begin(), 6 * 2, poison);
    const Forward want = standard_forward(clean.head());
    const Backward want_grad = standard_backward(clean.head(), clean.gradient());
    expect_close(standard_forward(bad.head()), want, "standard");
    expect_close(standard_backward(bad.head(), bad.gradient()), want_grad, "standard");
    for (const auto& [algorithm, got] : all_forward(bad.head())) {
      expect_close(got, want, algorithm);
    }
    for (const auto& [algorithm, got] : all_backward(bad.head(), bad.gradient())) {
      expect_close(got, want_grad, algorithm);
    }
  }
}

TEST(Mask, BadKeyReachesOnlyTheRowsThatSeeIt) {
  Sample sample({8, 8, 3, 2}, {.band = {-1, 0}});
  const Forward clean = standard_forward(sample.head());
  std::fill_n(&sample.k[5 * 3], 3, kNan);  // seen by the queries 5, 6, 7
  std::fill_n(&sample.v[5 * 2], 2, kNan);
  auto all = all_forward(sample.head());
  all.push_back({"standard", standard_forward(sample.head())});
  for (const auto& [algorithm, got] : all) {
    for (int64_t n = 0; n < 8 * 2; ++n) {
      if (n < 5 * 2) {
        EXPECT_NEAR(got.o[n], clean.o[n], 1e-13) << algorithm;
      } else {
        EXPECT_TRUE(std::isnan(got.o[n])) << algorithm;  // a bad score is not hidden
      }
    }
  }
}

TEST(Forward, LargeScores) {
  const Sample sample({6, 9, 4, 3}, {.scale = 1e5});
  const Forward want = standard_forward(sample.head());
  for (const double value : want.o) EXPECT_TRUE(std::isfinite(value));
  for (const auto& [algorithm, got] : all_forward(sample.head())) {
    expect_close(got, want, algorithm);
  }
}

TEST(Blocks, SizesFollowFromFastMemory) {
  const auto sizes = [](int64_t M, int64_t d, int64_t dv) {
    const BlockSizes B(
        M, Head{.sq = 1, .sk = 1, .d = d, .dv = dv, .q = {}, .k = {}, .v = {}, .rule = {}});
    return std::pair(B.outer, B.inner);
  };
  EXPECT_EQ(sizes(4 * 16 * 10, 16, 16), std::pair(int64_t{10}, int64_t{10}));
  EXPECT_EQ(sizes(4 * 16 * 40 + 1, 16, 16), std::pair(int64_t{41}, int64_t{16}));
  EXPECT_EQ(sizes(2 * 24 * 40, 8, 16), std::pair(int64_t{40}, int64_t{12}));
  EXPECT_EQ(sizes(1, 512, 1), std::pair(int64_t{1}, int64_t{1}));
}

TEST(Blocks, EmptyTileHasNoVisibleScore) {
  std::mt19937_64 random(3);
  int empty_tiles = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Shape shape{1 + int64_t(random() % 9), 1 + int64_t(random() % 9), 1, 1};
    const Rule rule{
        .band = {int64_t(random() % 6) - 1, int64_t(random() % 6) - 1, int64_t(random() % 5)}};
    const Sample sample(shape, rule);
    const int64_t i = random() % shape.sq, j = random() % shape.sk;
    const Range I{i, i + 1 + int64_t(random() % (shape.sq - i))};
    const Range J{j, j + 1 + int64_t(random() % (shape.sk - j))};
    const Matrix S = scores(sample.head(), I, J);
    const bool masked =
        std::all_of(S.data.begin(), S.data.end(), [](double s) { return s == -kInf; });
    ASSERT_EQ(empty(sample.head(), I, J), masked);
    empty_tiles += masked;
  }
  EXPECT_GT(empty_tiles, 100);
}

// ------------------------------------------------------------------------------- memory traffic

/// Elements moved, in both directions, by one pass over a square head with d = dv.
struct Moved {
  Traffic standard, flash1, flash2;
};
double total(const Traffic& t) { return double(t.loaded) + double(t.stored); }

Moved forward_traffic(int64_t N, int64_t d, int64_t M, const Rule& rule = {}) {
  const Sample sample({N, N, d, d}, rule);
  Moved moved;
  standard_forward(sample.head(), &moved.standard);
  flash1_forward(sample.head(), M, &moved.flash1);
  flash2_forward(sample.head(), M, &moved.flash2);
  return moved;
}

Moved backward_traffic(int64_t N, int64_t d, int64_t M) {
  const Sample sample({N, N, d, d}, {});
  const Head h = sample.head();
  Moved moved;
  standard_backward(h, {sample.dout.data()}, &moved.standard);
  flash1_backward(h, flash1_forward(h, M), {sample.dout.data()}, M, &moved.flash1);
  flash2_backward(h, flash2_forward(h, M), {sample.dout.data()}, M, &moved.flash2);
  return moved;
}

using MeasureTraffic = std::function<Moved(int64_t N, int64_t d, int64_t M)>;

/// The least-squares fit of T ~ N^a d^b M^c over a grid of sizes, with d <= M <= N d as the theorem
/// requires. The grid is a full product, so each exponent is a regression of its own.
void expect_exponents(const MeasureTraffic& measure, Traffic Moved::*algorithm) {
  double a = 0, b = 0, c = 0, squares = 0;
  for (int x : {-1, 0, 1}) {
    for (int y : {-1, 0, 1}) {
      for (int z : {-1, 0, 1}) {
        const Moved moved = measure(std::exp2(7 + x), std::exp2(5 + y), std::exp2(9 + z));
        const double log_T = std::log2(total(moved.*algorithm));
        a += x * log_T;
        b += y * log_T;
        c += z * log_T;
        squares += x * x;
      }
    }
  }
  EXPECT_NEAR(a / squares, 2, 0.1);
  EXPECT_NEAR(b / squares, 2, 0.1);
  EXPECT_NEAR(c / squares, -1, 0.1);
}

TEST(Traffic, StandardIsNdPlusNSquared) {
  for (const int64_t N : {16, 64, 128}) {
    for (const int64_t d : {4, 32}) {
      EXPECT_EQ(total(forward_traffic(N, d, 64).standard), 4 * N * d + 4 * N * N + N);
      EXPECT_EQ(total(backward_traffic(N, d, 64).standard), 8 * N * d + 7 * N * N);
    }
  }
}

TEST(Traffic, FlashIsNSquaredDSquaredOverM) {
  for (const auto algorithm : {&Moved::flash1, &Moved::flash2}) {
    expect_exponents([](int64_t N, int64_t d, int64_t M) { return forward_traffic(N, d, M); },
                     algorithm);
    expect_exponents(backward_traffic, algorithm);
  }
}

TEST(Traffic, FlashMovesLessThanStandardOnceMExceedsDSquared) {
  const int64_t N = 512, d = 16;
  for (const int64_t M : {16 * d * d, 32 * d * d}) {  // 8 and 4 blocks
    const Moved forward = forward_traffic(N, d, M), backward = backward_traffic(N, d, M);
    EXPECT_LT(total(forward.flash1), total(forward.standard));
    EXPECT_LT(total(forward.flash2), total(forward.flash1));
    EXPECT_LT(total(backward.flash1), total(backward.standard));
    EXPECT_LT(total(backward.flash2), total(backward.flash1));
  }
}

TEST(Traffic, Flash2WritesOutputsOnce) {
  const int64_t N = 128, d = 16, M = 4 * d * 8;  // blocks of 8 keys
  const Moved moved = forward_traffic(N, d, M);
  EXPECT_EQ(moved.flash2.stored, uint64_t(N * (d + 1)));                            // O, LSE
  EXPECT_EQ(moved.flash1.stored, uint64_t((1 + N / 8) * N * (d + 2)));              // O, l, m
  EXPECT_EQ(moved.flash2.loaded, uint64_t(N * d + (N / 8) * N * 2 * d));            // Q; K, V
  EXPECT_EQ(moved.flash1.loaded, uint64_t(2 * N * d + (N / 8) * N * (2 * d + 2)));  // K, V; Q, O..
}

TEST(Traffic, WorkIsThatOfAllTiles) {
  const int64_t N = 128, d = 16, M = 4 * d * 8;  // blocks of 8 rows and keys
  const Moved forward = forward_traffic(N, d, M), backward = backward_traffic(N, d, M);
  const Moved causal = forward_traffic(N, d, M, {.band = {-1, 0}});
  for (const auto algorithm : {&Moved::standard, &Moved::flash1, &Moved::flash2}) {
    EXPECT_EQ((forward.*algorithm).products, uint64_t(N * N * 2 * d));
    EXPECT_EQ((forward.*algorithm).exponentials, uint64_t(N * N));
  }
  EXPECT_EQ(forward.standard.rescales, 0u);
  EXPECT_EQ(forward.flash1.rescales, uint64_t(N * N / 8));
  EXPECT_EQ(forward.flash2.rescales, uint64_t(N * N / 8));
  EXPECT_EQ(backward.standard.products, uint64_t(N * N * 4 * d));  // S is there
  EXPECT_EQ(backward.flash1.products, uint64_t(N * N * 5 * d));
  EXPECT_EQ(backward.flash2.products, uint64_t(N * N * 5 * d));
  EXPECT_EQ(causal.flash1.products, forward.flash1.products);
  EXPECT_EQ(causal.flash2.products, forward.flash2.products * 136 / 256);  // 16 x 16 blocks
}

TEST(Traffic, MemoryEfficientStaysQuadratic) {
  const auto T = [](int64_t N) {
    const Sample sample({N, N, 16, 16}, {});
    Traffic traffic;
    memory_efficient_forward(sample.head(), &traffic);
    return total(traffic);
  };
  EXPECT_NEAR(std::log2(T(256) / T(128)), 2, 0.02);
}

TEST(Traffic, CausalSkipsHalfOfTheBlocks) {
  const int64_t N = 256, d = 16, M = 4 * d * 8;
  const Moved full = forward_traffic(N, d, M), causal = forward_traffic(N, d, M, {.band = {-1, 0}});
  const double ratio = double(causal.flash2.loaded) / double(full.flash2.loaded);
  EXPECT_GT(ratio, 0.5);
  EXPECT_LT(ratio, 0.55);
  EXPECT_EQ(causal.flash2.stored, full.flash2.stored);
}

TEST(Traffic, SplitsAddOneRoundTripOfTheParts) {
  const Sample sample({2, 128, 16, 16}, {});
  Traffic whole, split;
  flash2_forward(sample.head(), 512, &whole);
  split_kv_forward(sample.head(), 4, 512, &split);
  const uint64_t outputs = 2 * (16 + 1);
  EXPECT_EQ(split.stored, 5 * outputs);                              // four parts and the result
  EXPECT_EQ(split.loaded, whole.loaded + 3 * 2 * 16 + 4 * outputs);  // Q again, the parts
}

}  // namespace
}  // namespace fulgur::reference
