// hadamard(): against the definition in double precision, bits of the CPU's on every engine, and
// what it is for: codes of e4m3 over numbers with outliers.

#include "fulgur/codes/hadamard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "coded.h"
#include "engine_memory.h"
#include "engines.h"
#include "fulgur/append.h"
#include "fulgur/error.h"
#include "oracle.h"
#include "seed.h"

namespace fulgur::test {
namespace {

class Hadamard : public EveryEngine {
 protected:
  void draw(const Tensor& t) {
    for (int64_t i = 0; i < t.numel(); ++i) store(t.data, t.dtype, i, normal(random_));
  }
  std::mt19937_64 random_{test_seed()};
};

TEST_P(Hadamard, IsItsDefinitionAndItsInverseUndoesIt) {
  for (const int64_t d : {1, 6, 64, 80, 128, 192, 256, 512, 1024}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(testing::Message() << d << " columns of " << name_of(dtype));
      const double unit = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0;
      Buffer x(dtype, {2, 3, 2, d}), y(DType::kF32, {2, 3, 2, d}), back(DType::kF32, {2, 3, 2, d}),
          same(dtype, {2, 3, 2, d}), by_host(DType::kF32, {2, 3, 2, d});
      draw(x.t);
      hadamard({x.t, by_host.t});
      EngineMemory memory(engine());
      for (Buffer* const one : {&x, &y, &back, &same})
        memory.keep(std::as_writable_bytes(std::span(one->bytes)));
      hadamard({memory.at(x.t), memory.at(y.t)});
      hadamard({memory.at(y.t), memory.at(back.t), true});
      hadamard({memory.at(x.t), memory.at(same.t)});
      memory.bring_back();
      ASSERT_EQ(y.bytes, by_host.bytes);
      const std::vector<double> from = read(x.t), got = read(y.t), again = read(back.t),
                                rounded = read(same.t), want = by_definition(from, d, false);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], 1e-5) << i;
        ASSERT_NEAR(again[i], from[i], 1e-5) << i;
        ASSERT_NEAR(rounded[i], want[i], unit * std::fabs(want[i]) + 1e-5) << i;
      }
    }
  }
}

TEST_P(Hadamard, TensorsAreOnOneDevice) {
  Buffer x(DType::kF64, {1, 2, 1, 32}), y(DType::kF64, {1, 2, 1, 32});
  EngineMemory memory(engine());
  for (Buffer* const one : {&x, &y}) memory.keep(std::as_writable_bytes(std::span(one->bytes)));
  const Tensor there = memory.at(x.t);
  if (there.device == Device{}) GTEST_SKIP() << "on the host all are";
  EXPECT_THROW(hadamard({there, y.t}), Error);
  EXPECT_THROW(hadamard({there, memory.at(y.t)}), Error);  // f64
}

FULGUR_EVERY_ENGINE(Hadamard);

TEST(HadamardErrors, SayWhatIsWrong) {
  Buffer x(DType::kBF16, {1, 2, 1, 32}), y(DType::kBF16, {1, 2, 1, 32}),
      f16(DType::kF16, {1, 2, 1, 32}), other(DType::kBF16, {1, 2, 1, 16}),
      codes(DType::kInt8, {1, 2, 1, 32}), flat(DType::kBF16, {2, 32});
  const auto message = [](const HadamardArgs& args) -> std::string {
    try {
      hadamard(args);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({x.t, f16.t}), "y: got f16, want f32 or bf16 as x");
  EXPECT_EQ(message({x.t, x.t}), "y: shares its memory with x; an output needs its own");
  EXPECT_EQ(message({codes.t, y.t}), "x: got int8, want f32, bf16, f16 or f64");
  EXPECT_NE(message({x.t, other.t}).find("y: "), std::string::npos);
  EXPECT_EQ(message({flat.t, y.t}).rfind("x: got ", 0), 0u);
}

// The data of FlashAttention-3's paper: N(0, 1), plus N(0, 100) for one number in a thousand. Codes
// of e4m3 with a scale for each head lose about half as much of rotated rows. The numbers are
// always the same: few rows of q have an outlier, and these make most of the error, so that the
// ratio of the two errors is 0.4 to 0.8 for other numbers.
TEST(HadamardAccuracy, OutliersSpoilFewerCodes) {
  constexpr int64_t kRows = 128, kKeys = 2048, kDim = 128;
  std::mt19937_64 random(17);
  std::bernoulli_distribution outlier(0.001);
  const auto numbers = [&](int64_t rows) {
    Buffer x(DType::kF32, {1, rows, 1, kDim});
    for (int64_t i = 0; i < x.t.numel(); ++i)
      store(x.t.data, DType::kF32, i, normal(random) + (outlier(random) ? 10 * normal(random) : 0));
    return x;
  };
  Buffer q = numbers(kRows), k = numbers(kKeys), v = numbers(kKeys);
  const auto coded = [](const Buffer& x, bool rotates) {
    Buffer rotated(DType::kF32, {1, x.t.shape[1], 1, kDim});
    if (rotates) hadamard({x.t, rotated.t});
    return Coded::of(rotates ? rotated.t : x.t, DType::kE4M3, ScaleKind::kSequencesAndHeads, false,
                     DType::kF32, 32)
        .numbers();
  };
  const auto attention = [&](const std::vector<double>& q, const std::vector<double>& k,
                             const std::vector<double>& v) {
    std::vector<double> out(kRows * kDim);
    for (int64_t i = 0; i < kRows; ++i) {
      std::vector<double> p(kKeys);
      double most = -1e300, sum = 0;
      for (int64_t j = 0; j < kKeys; ++j) {
        double s = 0;
        for (int64_t c = 0; c < kDim; ++c) s += q[size_t(i * kDim + c)] * k[size_t(j * kDim + c)];
        p[size_t(j)] = s / std::sqrt(double{kDim});
        most = std::max(most, p[size_t(j)]);
      }
      for (double& one : p) sum += one = std::exp(one - most);
      for (int64_t j = 0; j < kKeys; ++j)
        for (int64_t c = 0; c < kDim; ++c)
          out[size_t(i * kDim + c)] += p[size_t(j)] / sum * v[size_t(j * kDim + c)];
    }
    return out;
  };
  const std::vector<double> want = attention(read(q.t), read(k.t), read(v.t)),
                            of_v = coded(v, false);
  const auto error = [&](bool rotates) {
    const std::vector<double> got = attention(coded(q, rotates), coded(k, rotates), of_v);
    double squares = 0;
    for (size_t i = 0; i < want.size(); ++i) squares += std::pow(got[i] - want[i], 2);
    return std::sqrt(squares / static_cast<double>(want.size()));
  };
  const double plain = error(false), rotated = error(true);
  EXPECT_LE(rotated, 0.6 * plain);
  RecordProperty("plain", std::to_string(plain));
  RecordProperty("rotated", std::to_string(rotated));
}

}  // namespace
}  // namespace fulgur::test
