// The kernels of bf16 and f16 on scalar models of tiles and of dot products, so that packing is
// tested on every machine with AVX-512; and the models against the instructions where there are
// these.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "call/make_problem.h"
#include "call/padding.h"
#include "cpu/kernels/amx.h"
#include "host/memory.h"
#include "oracle.h"
#include "workload.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile_test.cpp"
#include <hwy/foreach_target.h>
// Highway wants its own header after foreach_target.
#include "call/dropout.h"
#include "cpu/kernels/bf16/backward-inl.h"
#include "cpu/kernels/bf16/decode_amx-inl.h"
#include "cpu/kernels/bf16/decode_dot-inl.h"

#if HWY_TARGET == HWY_AVX3
#include "cpu/tile_models-inl.h"
#endif

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX3)
namespace fulgur::test {
namespace {

namespace tiles = cpu::N_AVX3;
using tiles::Matrix;

class Tiles : public testing::Test {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & HWY_AVX3) == 0) GTEST_SKIP() << "this machine lacks AVX-512";
  }

  std::mt19937 random_{1};
};

/// The same on every path.
class Paths : public Tiles, public testing::WithParamInterface<tiles::Path> {
 protected:
  const DType dtype_ = GetParam().dtype;

  double element(const Matrix& m, int64_t i) const { return load(m.data(), dtype_, i); }
  /// bf16: whole numbers, whose products and sums are exact. f16: numbers of all 11 bits, the
  /// products of whose parts are rounded as they are added up.
  Matrix numbers(int64_t size) {
    Matrix m(size);
    for (int64_t i = 0; i < size; ++i) {
      const int whole = static_cast<int>(random_() % 17) - 8;
      const int bits = static_cast<int>(random_() % 4095) - 2047;
      store(m.data(), dtype_, i, dtype_ == DType::kBF16 ? whole : bits * 0x1p-8);
    }
    return m;
  }
  /// `size`: of the terms of a sum.
  double error_bound(double size) const { return dtype_ == DType::kBF16 ? 0 : 0x1p-21 * size; }
};
INSTANTIATE_TEST_SUITE_P(, Paths, testing::ValuesIn(tiles::kPaths),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(Tiles, ModelsAreTheInstructions) {
  const bool amx = cpu::amx_unavailable().empty(), dots = __builtin_cpu_supports("avx512bf16") != 0;
  if (!amx && !dots) GTEST_SKIP() << "this machine has neither";
  for (int round = 0; round < 300; ++round) {
    alignas(64) uint16_t A[512], B[512];
    alignas(64) float C[256];
    // Exponents of all sizes, denormal ones and sums below the least normal number among them.
    const int spread = round % 3 == 0 ? 8 : round % 3 == 1 ? 60 : 250;
    const auto number = [&](int middle) {
      const auto exponent = static_cast<uint32_t>(std::clamp<int>(
          middle + static_cast<int>(random_() % static_cast<uint32_t>(spread)) - spread / 2, 0,
          254));
      return static_cast<uint16_t>((random_() % 2) << 15 | exponent << 7 | random_() % 128);
    };
    const int middle = round % 2 == 0 ? 127 : 64;
    for (uint16_t& x : A) x = number(middle);
    for (uint16_t& x : B) x = number(middle);
    for (float& x : C) x = f32_from_bf16(number(2 * middle - 127));
    ASSERT_TRUE(!amx || tiles::is_tile_model(1 + round % 16, 16 - round / 16 % 16, A, B, C))
        << "round " << round;
    ASSERT_TRUE(!dots || tiles::is_dot_model(A, B, C)) << "round " << round;
  }
}

TEST_P(Paths, ProductsAlongRows) {
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{64, 32, 64},
                                {16, 16, 32},
                                {1, 1, 1},
                                {50, 20, 80},
                                {33, 65, 17},
                                {7, 40, 130}}) {
    const Matrix A = numbers(m * k), B = numbers(n * k);
    const std::vector<float> C = GetParam().rows_by_rows(A, B, k);
    const int64_t ldc = static_cast<int64_t>(C.size()) / (tiles::blocks_of(m) * 16);
    for (int64_t i = 0; i < m * n; ++i) {
      double want = 0, size = 0;
      for (int64_t c = 0; c < k; ++c) {
        const double term = element(A, i / n * k + c) * element(B, i % n * k + c);
        want += term;
        size += std::fabs(term);
      }
      ASSERT_NEAR(C[i / n * ldc + i % n], want, error_bound(size)) << m << " x " << n << " x " << k;
    }
  }
}

TEST_P(Paths, ProductsAlongColumns) {
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{64, 32, 64},
                                {16, 16, 32},
                                {1, 1, 1},
                                {80, 20, 50},
                                {17, 65, 33},
                                {130, 40, 7}}) {
    const Matrix A = numbers(k * m), B = numbers(k * n);
    const std::vector<float> C = GetParam().columns_by_columns(A, B, m, n);
    const int64_t ldc = static_cast<int64_t>(C.size()) / (tiles::blocks_of(m) * 16);
    for (int64_t i = 0; i < m * n; ++i) {
      double want = 1, size = 1;
      for (int64_t r = 0; r < k; ++r) {
        const double term = element(A, r * m + i / n) * element(B, r * n + i % n);
        want += term;
        size += std::fabs(term);
      }
      ASSERT_NEAR(C[i / n * ldc + i % n], want, error_bound(size)) << m << " x " << n << " x " << k;
    }
  }
}

TEST_P(Paths, CensusFindsWhatTilesChange) {
  struct {
    std::vector<uint16_t> not_finite, denormal, normal;
  } const of_bf16 = {{0x7f80, 0xff80, 0x7fc0, 0xffff},
                     {0x0001, 0x807f},
                     {0x0000, 0x8000, 0x0080, 0x7f7f}},
          // The parts of f16's denormal numbers are normal.
      of_f16 = {{0x7c00, 0xfc00, 0x7e00, 0xffff, 0x7c01},
                {},
                {0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x7bff}};
  const auto& of = dtype_ == DType::kBF16 ? of_bf16 : of_f16;
  for (const int64_t at : {0, 31, 32, 40, 41 * 17 - 1}) {
    Matrix m = numbers(41 * 17);
    const auto expect = [&](uint16_t x, bool finite, bool denormal) {
      m[at] = x;
      const auto found = GetParam().census_of(m, 41);
      EXPECT_EQ(found.finite, finite) << x;
      EXPECT_EQ(found.denormal, denormal) << x;
    };
    for (const uint16_t x : of.not_finite) expect(x, false, false);
    for (const uint16_t x : of.denormal) expect(x, true, true);
    for (const uint16_t x : of.normal) expect(x, true, false);
  }
}

// Every f16 there is, so that every product of two is exact: (a + e) b + (64 e + f) g, as c is
// b + 64 g.
TEST_F(Tiles, PartsOfF16) {
  Matrix every(65536);
  std::iota(every.begin(), every.end(), uint16_t{0});
  for (int64_t i = 0; i < 65536; i += 32) {
    const auto of_a = tiles::parts_of_f16<tiles::Side::kA>(&every[i]);
    const auto of_b = tiles::parts_of_f16<tiles::Side::kB>(&every[i]);
    for (int64_t n = 0; n < 32; ++n) {
      const float x = f32_from_f16(every[i + n]);
      const auto [a, e, f] = std::array{of_a[0][n], of_a[1][n], of_a[2][n]};
      const auto [b, c, g] = std::array{of_b[0][n], of_b[1][n], of_b[2][n]};
      if (std::isfinite(x)) {
        ASSERT_TRUE(a + e == x && 64 * e + f == x) << x;
        ASSERT_TRUE(b + g == x && b + 64 * g == c) << x;
      } else {  // inf * y is inf then, and neither 0 * inf nor inf - inf
        ASSERT_TRUE(std::isnan(x) ? std::isnan(a) && std::isnan(b) : a == x && b == x) << x;
        ASSERT_TRUE(e == 0 && f == 0 && c == 0 && g == 0) << x;
      }
      // Tiles would take smaller products of two for 0.
      for (const float part : {a, e, f, b, c, g}) {
        ASSERT_TRUE(part == 0 || !(std::fabs(part) < 0x1p-63)) << x;
      }
    }
  }
}

// P and dS, which are f32, with f16: on either side rounded to a quarter of f16's half ulp.
TEST_F(Tiles, PartsOfF32) {
  for (int round = 0; round < 20000; ++round) {
    float x[16], y[16];
    for (int i = 0; i < 16; ++i) {
      const auto exponent = static_cast<int>(random_() % 60) - 30;
      x[i] = std::ldexp(static_cast<float>(random_() % (1 << 24)) - 0x1p23f, exponent);
      y[i] = f32_from_f16(static_cast<uint16_t>(random_() % 0x7c00));
    }
    const auto xy = tiles::products_of_parts(x, y), yx = tiles::products_of_parts(y, x);
    for (size_t i = 0; i < 16; ++i) {
      const double want = static_cast<double>(x[i]) * y[i], most = 0x1p-13 * std::fabs(want);
      ASSERT_NEAR(xy[i], want, most) << x[i] << " * " << y[i];
      ASSERT_NEAR(yx[i], want, most) << y[i] << " * " << x[i];
    }
  }
}

/// A call of a workload's tensors.
struct Prepared {
  ForwardArgs forward;
  BackwardArgs backward;
  Problem problem, backward_problem;
  cpu::Given given;

  explicit Prepared(Workload& w)
      : forward(w.forward),
        backward(without_dsinks(w)),
        problem(make_problem(forward, w.options)),
        backward_problem(make_problem(backward, w.options)),
        given{static_cast<const float*>(forward.alibi_slopes.data),
              forward.sinks,
              forward.tree_mask,
              forward.bias,
              dropout_of(problem, forward, w.run_options),
              OperandScaling(problem, forward)} {}
  void run_forward(const tiles::Path& path, int64_t block = tiles::kBlock) const {
    path.run_forward(problem, given, forward, block);
  }
  void run_backward(const tiles::Path& path) const {
    path.run_backward(backward_problem, given, backward);
  }

 private:
  static BackwardArgs without_dsinks(Workload& w) {
    w.backward.dsinks = {};  // no work of tiles
    return w.backward;
  }
};

// The kernels themselves, as they are compiled for the instructions.
TEST_P(Paths, KernelsOnTheModelFollowTheReference) {
  const Case cases[] = {
      {.sq = 130, .sk = 333},
      {.batch = 2, .sq = 100, .sk = 200, .hq = 4, .hk = 2, .d = 80, .dv = 40, .mask = causal()},
      {.sq = 65, .sk = 63, .d = 17, .dv = 1, .mask = window(16, 3), .softcap = 2},
      {.sq = 40, .sk = 97, .hq = 3, .d = 1, .dv = 24, .alibi = Alibi::kHeads, .dropout = 0.25},
      // The slope of such a cap sees any error of small scores.
      {.sq = 70, .sk = 333, .hq = 2, .hk = 1, .softcap = 1e-4},
      // With such a one they are denormal numbers on the way.
      {.sq = 40, .sk = 70, .softcap = 1e37},
      {.sq = 90, .sk = 70, .hq = 4, .hk = 2, .mask = causal(), .sinks = true},
      {.sq = 33, .sk = 65, .d = 512, .dv = 512, .mask = causal()},
      {.batch = 3, .sq = 40, .sk = 70, .hq = 2, .d = 24, .dv = 33, .layout = Layout::kPacked},
      {.sq = 7,
       .sk = 600,
       .hq = 8,
       .d = 128,
       .dv = 128,
       .mask = causal(),
       .layout = Layout::kPadded},
  };
  for (Case c : cases) {
    c.dtype = dtype_;
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    const Prepared call(w);
    const Expected e = expect(w);
    call.run_forward(GetParam());
    EXPECT_TRUE(forward_is_right(w, e));
    call.run_backward(GetParam());
    EXPECT_TRUE(backward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
  }
}

// In whole tiles a bias is added as the scores become P, unless it may hide keys from rows that
// have not seen any: their scores are finished in memory before. Here the keys are hidden late, in
// rows that have seen some.
TEST_P(Paths, BiasesOfWholeTiles) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const Bias bias :
       {Bias::kAll, Bias::kHeads, Bias::kTransposed, Bias::kColumns, Bias::kPairs}) {
    for (const double late : {0.25, -kInf, -3e38, 60.0}) {
      const Case c{.dtype = dtype_, .sq = 70, .sk = 333, .hq = 2, .hk = 1, .bias = bias};
      SCOPED_TRACE(testing::Message() << c.name() << ", " << late);
      Workload w(c, c.seed());
      std::vector<double> values = read(w.forward.bias);
      const bool bools = w.forward.bias.dtype == DType::kBool;
      for (double& x : values) x = bools ? 1 : std::max(x, -1.0);
      const int64_t row = bias == Bias::kColumns ? 0 : 40;
      for (const int64_t key : {70, 200, 201}) values[row * c.sk + key] = bools ? late > 0 : late;
      write(w.forward.bias, values);
      w.seal();
      const Prepared call(w);
      call.run_forward(GetParam());
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      const auto out = bits(w.forward.out), lse = bits(w.forward.lse);
      call.run_forward(GetParam(), 1);
      EXPECT_EQ(bits(w.forward.out), out);
      EXPECT_EQ(bits(w.forward.lse), lse);
    }
  }
}

/// The ways to decode bf16, and the most rows a kv head that they take.
struct Decoding {
  const char* name;
  int64_t max_rows;
  void (*run)(const Problem&, const cpu::Given&, const ForwardArgs&);
};
class Decodings : public Tiles, public testing::WithParamInterface<Decoding> {};
INSTANTIATE_TEST_SUITE_P(, Decodings,
                         testing::Values(Decoding{"tiles", 32, tiles::decode_by_tiles},
                                         Decoding{"dot_products", 16, tiles::decode_by_dots}),
                         [](const auto& info) { return std::string(info.param.name); });

// Rows of one tile or two; keys and head dims that fill tiles, pairs and vectors, or not; keys
// that lie evenly, so that tiles take them where they are, or not.
TEST_P(Decodings, OnTheModelFollowTheReference) {
  const Case cases[] = {
      {.sq = 1, .sk = 333},
      {.sq = 0, .sk = 60},
      {.sq = 3, .sk = 128, .d = 128, .dv = 128},
      {.batch = 2, .sq = 1, .sk = 200, .hq = 12, .hk = 3, .d = 96, .dv = 40},
      {.sq = 2, .sk = 131, .hq = 8, .hk = 2, .d = 80, .dv = 70, .mask = causal(), .dropout = 0.25},
      {.sq = 4, .sk = 257, .hq = 6, .hk = 2, .d = 17, .dv = 1, .mask = window(90, 0), .softcap = 2},
      {.sq = 1, .sk = 97, .hq = 7, .d = 33, .dv = 24, .alibi = Alibi::kHeads, .sinks = true},
      {.sq = 5, .sk = 190, .hq = 8, .hk = 2, .mask = causal()},
      {.sq = 4, .sk = 150, .hq = 8, .d = 512, .dv = 512, .mask = causal()},
      {.batch = 3,
       .sq = 2,
       .sk = 70,
       .hq = 8,
       .hk = 4,
       .d = 24,
       .dv = 33,
       .layout = Layout::kPacked},
      {.sq = 2, .sk = 300, .hq = 16, .hk = 2, .d = 128, .dv = 128, .layout = Layout::kPadded},
      {.sq = 3, .sk = 100, .hq = 4, .hk = 2, .mask = causal(), .tree = Tree::kRandom},
  };
  for (Case c : cases) {
    if (c.hq / c.hk * c.sq > GetParam().max_rows) continue;
    c.dtype = DType::kBF16;
    for (const bool denormal : {false, true}) {
      SCOPED_TRACE(c.name() + (denormal ? " denormal" : ""));
      Workload w(c, c.seed());
      std::vector<double> values = read(w.forward.v);
      // Products would take them for 0, so that vectors add such keys.
      for (size_t i = 0; denormal && i < values.size(); i += 5) values[i] = 0x1p-130;
      write(w.forward.v, values);
      w.seal();
      const Prepared call(w);
      GetParam().run(call.problem, call.given, call.forward);
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      EXPECT_TRUE(w.check_memory());
    }
  }
}

// Denormal values alone, which products would take for 0.
TEST_P(Decodings, KeepDenormalValues) {
  Workload w({.dtype = DType::kBF16, .sq = 2, .sk = 130, .hq = 8, .hk = 2, .dv = 120}, 3);
  std::vector<double> values = read(w.forward.v);
  for (double& value : values) value = std::ldexp(value, -128);
  write(w.forward.v, values);
  w.seal();
  const Prepared call(w);
  GetParam().run(call.problem, call.given, call.forward);
  const std::vector<double> out = read(w.forward.out), want = expect_forward(w).reference.out;
  for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], want[i], 0x1p-132) << i;
}

// NaN and infinity in a key that a row does not see change nothing of it.
TEST_P(Decodings, WhatIsNotFiniteStaysHidden) {
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const Case c{.dtype = DType::kBF16, .sq = 2, .sk = 130, .hq = 8, .hk = 2, .mask = causal()};
    Workload clean(c, 9), dirty(c, 9);
    for (const Tensor& t : {dirty.forward.k, dirty.forward.v}) {
      std::vector<double> x = read(t);
      std::fill(x.end() - 2 * c.d, x.end(), value);  // the last key, of both heads
      write(t, x);
    }
    dirty.seal();
    for (Workload* w : {&clean, &dirty}) {
      const Prepared call(*w);
      GetParam().run(call.problem, call.given, call.forward);
    }
    const auto got = read(dirty.forward.out), want = read(clean.forward.out);
    for (int64_t i = 0; i < 8 * c.dv; ++i) ASSERT_NEAR(got[i], want[i], 0x1p-7) << i;  // query 0
    EXPECT_TRUE(std::all_of(got.end() - 8 * c.dv, got.end(), [](double x) { return x != x; }));
  }
}

// Scores that spread over hundreds of powers of two: rows outgrow their maximum in either half of a
// tile, with rows that do not, and with values that vectors add.
TEST_P(Paths, RowsOutgrowTheirMaximum) {
  const Case cases[] = {
      {.sq = 70, .sk = 300, .d = 64, .dv = 80},
      {.sq = 70, .sk = 300, .d = 16, .dv = 16, .mask = causal(), .dropout = 0.25},
  };
  for (Case c : cases) {
    for (const bool denormal : {false, true}) {
      c.dtype = dtype_;
      SCOPED_TRACE(c.name() + (denormal ? " denormal" : ""));
      Workload w(c, c.seed());
      w.options.scale = 1;
      std::vector<double> values = read(w.forward.v);
      const double tiny = dtype_ == DType::kBF16 ? 0x1p-130 : 0x1p-20;
      if (denormal) values[40 * c.dv] = values[200 * c.dv] = tiny;
      write(w.forward.v, values);
      w.seal();
      const Prepared call(w);
      const Expected e = expect(w);
      call.run_forward(GetParam());
      EXPECT_TRUE(forward_is_right(w, e));
      // What a row's neighbours hold changes none of its bits.
      const auto out = bits(w.forward.out), lse = bits(w.forward.lse);
      call.run_forward(GetParam(), 1);
      EXPECT_EQ(bits(w.forward.out), out);
      EXPECT_EQ(bits(w.forward.lse), lse);
    }
  }
}

// The scores are sums of exact products, with the error of f32, however large they are.
TEST_P(Paths, LargeScores) {
  Workload w({.dtype = dtype_, .sq = 70, .sk = 300}, 3);
  w.options.scale = 1;
  std::mt19937_64 random(3);
  for (const Tensor& t : {w.forward.q, w.forward.k}) randomize(t, random, 4);
  w.seal();
  const Prepared call(w);
  call.run_forward(GetParam());
  EXPECT_TRUE(forward_is_close(w, expect_forward(w)));
}

// Elements near both ends of f16, and its denormal numbers, in either pass.
TEST_P(Paths, LargeAndSmallElements) {
  for (const double size : {0x1p13, 0x1p-14, 0x1p-18}) {
    Workload w({.dtype = dtype_, .sq = 70, .sk = 130, .d = 40, .dv = 40}, 5);
    std::mt19937_64 random(5);
    // Scores of usual size; dV, dK and dQ as well, but for denormal ones.
    randomize(w.forward.k, random, std::min(size, 0x1p13));
    randomize(w.forward.v, random, size);
    w.options.scale = 1 / (size * 8);
    w.seal();
    SCOPED_TRACE(size);
    const Prepared call(w);
    const Expected e = expect(w);
    call.run_forward(GetParam());
    EXPECT_TRUE(forward_is_right(w, e));
    call.run_backward(GetParam());
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// NaN and infinity in a key that all rows but the last are hidden from, then in a row that sees
// only the first key: what has no part in it stays what it is, up to a rounding where vectors add.
TEST_P(Paths, WhatIsNotFiniteStaysHidden) {
  constexpr int64_t kRows = 90, kDim = 24;
  for (const double value : {kNan, kInf, -kInf}) {
    for (const bool in_key : {true, false}) {
      SCOPED_TRACE((in_key ? "key " : "row ") + std::to_string(value));
      const Case c{
          .dtype = dtype_, .sq = kRows, .sk = kRows, .d = kDim, .dv = kDim, .mask = causal()};
      Workload clean(c, 9), dirty(c, 9);
      for (const Tensor& t : in_key ? std::array{dirty.forward.k, dirty.forward.v}
                                    : std::array{dirty.forward.q, dirty.backward.dout}) {
        std::vector<double> x = read(t);
        std::fill_n(in_key ? x.end() - kDim : x.begin(), kDim, value);
        write(t, x);
      }
      dirty.seal();
      for (Workload* w : {&clean, &dirty}) {
        const Prepared call(*w);
        call.run_forward(GetParam());
        call.run_backward(GetParam());
      }
      const auto expect_near = [&](const char* name, const Tensor& got, const Tensor& want,
                                   int64_t begin, int64_t end) {
        const auto x = read(got), y = read(want);
        const double ulp = dtype_ == DType::kF16 ? 0x1p-10 : 0x1p-7;
        for (int64_t n = begin; n < end; ++n) {
          ASSERT_NEAR(x[n], y[n], ulp * std::max(1.0, std::fabs(y[n]))) << name << " " << n;
        }
      };
      // Row 0 of Q and dO reaches key 0 alone; the last key reaches the last row alone.
      const int64_t begin = in_key ? 0 : kDim, end = (in_key ? kRows - 1 : kRows) * kDim;
      expect_near("out", dirty.forward.out, clean.forward.out, begin, end);
      expect_near("dq", dirty.backward.dq, clean.backward.dq, begin, end);
      expect_near("lse", dirty.forward.lse, clean.forward.lse, begin / kDim, end / kDim);
      if (in_key) continue;  // the last row sees every key
      expect_near("dk", dirty.backward.dk, clean.backward.dk, begin, end);
      expect_near("dv", dirty.backward.dv, clean.backward.dv, begin, end);
    }
  }
}

// Where rows see them, they give what f32 gives: infinite values are infinities of their sign, and
// infinite keys scores that are.
TEST_P(Paths, VisibleInfinities) {
  for (const Mask& mask : {full(), causal(), window(5, 3)}) {
    Workload w({.dtype = dtype_, .sq = 90, .sk = 90, .d = 24, .dv = 24, .mask = mask}, 11);
    std::vector<double> q = read(w.forward.q), k = read(w.forward.k), v = read(w.forward.v);
    for (int64_t i = 0; i < 90; ++i) q[i * 24 + 3] = 1 + 0x1p-7 * static_cast<double>(i % 7);
    k[60 * 24 + 3] = k[20 * 24 + 3] = -kInf;  // such a key weighs nothing
    v[33 * 24 + 5] = kInf;
    v[34 * 24 + 5] = v[50 * 24 + 6] = -kInf;
    v[51 * 24 + 7] = kNan;
    write(w.forward.q, q);
    write(w.forward.k, k);
    write(w.forward.v, v);
    w.seal();
    SCOPED_TRACE(w.c.name());
    const Prepared call(w);
    call.run_forward(GetParam());
    EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
  }
}

}  // namespace
}  // namespace fulgur::test
#endif

#if HWY_ONCE && !(HWY_TARGETS & HWY_AVX3)
TEST(Tiles, WantAvx512) { GTEST_SKIP() << "compiled without AVX-512"; }
#endif
