// Low-bit formats: what codes stand for, what quantize() makes of numbers, and attention over
// codes, against a decoder of these tests in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "call.h"
#include "coded.h"
#include "engine_memory.h"
#include "engines.h"
#include "fulgur/append.h"
#include "fulgur/codes/hadamard.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
uint64_t seed() {
  const char* const given = std::getenv("FULGUR_TEST_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

// ---- what quantize() computes ----

/// Codes of numbers that share a scale, as numbers.
std::vector<double> round_trip(const std::vector<float>& x, DType format, bool zero = false,
                               DType scale = DType::kF32) {
  const auto n = static_cast<int64_t>(x.size());
  return Coded::of(ConstTensor::of(std::span(x), {1, 1, n}), format,
                   scaled_inside(format) ? ScaleKind::kNone : ScaleKind::kRows, zero, scale, n)
      .numbers();
}

TEST(Quantize, IsAsNearAsTheFormatLets) {
  std::mt19937_64 random(seed());
  for (const DType format : kFormats) {
    for (const bool zero : {false, true}) {
      if (zero && !has_zero_point(format)) continue;
      for (const double scale : {1e-3, 1.0, 1e4}) {
        std::vector<float> x(64);
        for (float& one : x) one = static_cast<float>((normal(random) + (zero ? 3 : 0)) * scale);
        const std::vector<double> got = round_trip(x, format, zero);
        for (size_t begin = 0; begin < x.size(); begin += 32) {
          double largest = 0, low = 1e30, high = -1e30;
          const size_t b = scaled_inside(format) ? begin : 0,
                       e = scaled_inside(format) ? b + 32 : 64;
          for (size_t i = b; i < e; ++i) {
            largest = std::max(largest, std::fabs(double{x[i]}));
            low = std::min(low, double{x[i]});
            high = std::max(high, double{x[i]});
          }
          for (size_t i = begin; i < begin + 32; ++i) {
            // Half a step of codes, and what f16 makes of the scale of a block.
            const double size = std::fabs(double{x[i]}),
                         f16 = scaled_inside(format) ? largest * 0x1p-10 + 0x1p-18 : largest * 1e-6;
            double step = largest / 127;
            if (format == DType::kE4M3) step = std::max(size / 8, largest / 448 * 0x1p-9);
            if (format == DType::kE5M2) step = std::max(size / 4, largest / 57344 * 0x1p-16);
            if (format == DType::kInt8 && zero) step = (high - low) / 255;
            if (format == DType::kInt4) step = zero ? (high - low) / 15 : largest / 7;
            // The extreme on the other side may be one code too far: it saturates.
            if (format == DType::kQ4_0) step = 2 * largest / 8;
            if (format == DType::kQ5_0) step = 2 * largest / 16;
            if (format == DType::kQ4_1) step = (high - low) / 15;
            if (format == DType::kQ5_1) step = (high - low) / 31;
            if (format == DType::kIQ4_NL) step = largest * 28 / 127;
            EXPECT_LE(std::fabs(got[i] - x[i]), step / 2 * (1 + 1e-5) + f16)
                << name_of(format) << " of " << x[i] << ", largest " << largest << zero;
          }
        }
      }
    }
  }
}

TEST(Quantize, EveryCodeIsANumberThatGivesItBack) {
  for (const DType format : {DType::kE4M3, DType::kE5M2, DType::kInt8}) {
    std::vector<float> x;
    std::vector<uint8_t> want;
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      const double number = decoded(format, &byte, 0);
      if (!std::isfinite(number)) continue;
      x.push_back(static_cast<float>(number));
      want.push_back(byte);
    }
    const auto n = static_cast<int64_t>(x.size());
    Buffer codes(format, {1, 1, n});
    quantize({.x = ConstTensor::of(std::span<const float>(x), {1, 1, n}), .codes = codes.t});
    EXPECT_EQ(codes.bytes, want) << name_of(format);
  }
}

TEST(Quantize, TiesGoToEvenCodesAndWhatIsTooLargeSaturates) {
  const auto codes_of = [](DType format, std::vector<float> x) {
    const auto n = static_cast<int64_t>(x.size());
    Buffer codes(format, {1, 1, n});
    quantize({.x = ConstTensor::of(std::span<const float>(x), {1, 1, n}), .codes = codes.t});
    return codes.bytes;
  };
  using Bytes = std::vector<uint8_t>;
  EXPECT_EQ(
      codes_of(DType::kInt8, {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 127.6f, 300, -300, kInf, -kInf}),
      (Bytes{0, 2, 2, 0, 0xfe, 127, 127, 0x80, 127, 0x80}));
  EXPECT_EQ(codes_of(DType::kInt4, {0.5f, 1.5f, -9, 9, 7.4f, -8.4f}), (Bytes{0x20, 0x78, 0x87}));
  EXPECT_EQ(codes_of(DType::kE4M3, {448, 480, 1e30f, -kInf, 17, 19, 0x1p-10f, 0x1.8p-9f, -0.0f}),
            (Bytes{0x7e, 0x7e, 0x7e, 0xfe, 0x58, 0x5a, 0, 2, 0x80}));
  EXPECT_EQ(codes_of(DType::kE5M2, {57344, 1e30f, -kInf, 9, 11, 0x1p-17f, 0x1.8p-16f}),
            (Bytes{0x7b, 0x7b, 0xfb, 0x48, 0x4a, 0, 2}));
  EXPECT_EQ(codes_of(DType::kE4M3, {kNan})[0] & 127, 127);
  EXPECT_EQ(codes_of(DType::kE5M2, {kNan})[0] & 127, 127);
}

TEST(Quantize, NanZerosAndInfinities) {
  for (const DType format : kFormats) {
    const std::vector<double> zeros = round_trip(std::vector<float>(32, 0), format);
    EXPECT_EQ(zeros, std::vector<double>(32, 0)) << name_of(format);
    std::vector<float> x(32, 1);
    x[3] = kInf;
    x[4] = -kInf;
    for (const double got : round_trip(x, format))
      EXPECT_TRUE(std::isfinite(got)) << name_of(format);
    x[5] = kNan;
    const std::vector<double> with_nan = round_trip(x, format);
    EXPECT_TRUE(std::isnan(with_nan[5])) << name_of(format);
    const bool alone = format == DType::kE4M3 || format == DType::kE5M2;
    EXPECT_EQ(std::isnan(with_nan[0]), !alone) << name_of(format);
  }
  // Equal numbers have a range of 0.
  for (const double got : round_trip(std::vector<float>(32, -5), DType::kInt4, true))
    EXPECT_EQ(got, -5);
  // Scales beyond f16 are its largest number.
  const std::vector<double> large =
      round_trip(std::vector<float>(32, 1e30f), DType::kInt8, false, DType::kF16);
  EXPECT_EQ(large[0], 127 * 65504.0);
}

TEST(Quantize, BlocksAreGgmls) {
  // 32 numbers i - 16: the largest by magnitude is -16.
  std::vector<float> x(32);
  for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(i - 16);
  const auto block = [&](DType format) {
    Buffer codes(format, {1, 1, 32});
    quantize({.x = ConstTensor::of(std::span<const float>(x), {1, 1, 32}), .codes = codes.t});
    return codes.bytes;
  };
  const std::vector<uint8_t> q5 = block(DType::kQ5_0), q8 = block(DType::kQ8_0),
                             q4 = block(DType::kQ4_0);
  ASSERT_EQ(q5.size(), 22u);
  EXPECT_EQ((std::vector<uint8_t>{q5[0], q5[1]}), (std::vector<uint8_t>{0x00, 0x3c}));  // 1
  EXPECT_EQ((std::vector<uint8_t>{q5[2], q5[3], q5[4], q5[5]}),
            (std::vector<uint8_t>{0, 0, 0xff, 0xff}));
  for (int i = 0; i < 16; ++i) EXPECT_EQ(q5[6 + i], i | i << 4);
  ASSERT_EQ(q8.size(), 34u);
  EXPECT_EQ(q8[2], 0x81);  // -127
  ASSERT_EQ(q4.size(), 18u);
  EXPECT_EQ(load(q4.data(), DType::kF16, 0), 2);
  EXPECT_EQ(q4[2], 0x80);  // -16 is code 0, and 0 is code 8
}

// Codes of numbers less the means of columns, of those that are finite.
TEST(Quantize, MeansAreTakenFromNumbersAndGivenBack) {
  std::mt19937_64 random(seed());
  constexpr int64_t kBatch = 2, kRows = 150, kHeads = 2, kDim = 64;
  for (const DType format : kFormats) {
    SCOPED_TRACE(name_of(format));
    const ScaleKind kind = scaled_inside(format) ? ScaleKind::kNone : ScaleKind::kRows;
    Buffer x(DType::kF32, {kBatch, kRows, kHeads, kDim}), mean(DType::kF32, {kBatch, kHeads, kDim}),
        back(DType::kF32, {kBatch, kRows, kHeads, kDim});
    std::vector<double> numbers(static_cast<size_t>(x.t.numel())), want(kBatch * kHeads * kDim);
    for (size_t i = 0; i < numbers.size(); ++i)
      numbers[i] = normal(random) + 10.0 * static_cast<double>(i % kDim);
    numbers[7] = kInf;  // which is no part of a mean
    write(x.t, numbers);
    numbers = read(x.t);
    std::vector<double> counts(want.size());
    const auto column = [&](size_t i) {
      return i / (kRows * kHeads * kDim) * kHeads * kDim + i % (kHeads * kDim);
    };
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (!std::isfinite(numbers[i])) continue;
      want[column(i)] += numbers[i];
      ++counts[column(i)];
    }
    for (size_t i = 0; i < want.size(); ++i) want[i] /= counts[i];
    Coded c = Coded::of(x.t, format, kind, false, DType::kF32, kDim);
    quantize({.x = x.t, .codes = c.codes.t, .scale = c.scale.t, .mean = mean.t});
    const std::vector<double> got = read(mean.t), codes = c.numbers();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-6 * 640);
    dequantize({.codes = c.codes.t, .scale = c.scale.t, .x = back.t, .mean = mean.t});
    const std::vector<double> again = read(back.t);
    for (size_t i = kDim * kHeads; i < numbers.size(); ++i) {
      ASSERT_NEAR(again[i], codes[i] + got[column(i)], 1e-4);
      ASSERT_NEAR(again[i], numbers[i], 1)
          << i;  // 630 is a large number, 5 the largest distance from the mean
    }
    // A mean that is there.
    Coded same = c;
    same.codes.t.data = same.codes.bytes.data();
    same.scale.t.data = same.scale.bytes.data();
    std::fill(same.codes.bytes.begin(), same.codes.bytes.end(), uint8_t{0});
    quantize({.x = x.t,
              .codes = same.codes.t,
              .scale = same.scale.t,
              .mean = mean.t,
              .static_mean = true});
    EXPECT_EQ(same.codes.bytes, c.codes.bytes);
  }
}

TEST(Quantize, StaticScalesAreRead) {
  std::mt19937_64 random(seed());
  std::vector<float> x(4 * 3 * 32);
  for (float& one : x) one = static_cast<float>(normal(random));
  const ConstTensor t = ConstTensor::of(std::span<const float>(x), {4, 3, 32});
  const Coded first = Coded::of(t, DType::kInt8, ScaleKind::kHeads, true, DType::kF16, 32);
  Buffer codes(DType::kInt8, {4, 3, 32});
  const std::vector<uint8_t> scale = first.scale.bytes;
  quantize({.x = t,
            .codes = codes.t,
            .scale = first.scale.t,
            .zero_point = first.zero_point.t,
            .static_scale = true});
  EXPECT_EQ(codes.bytes, first.codes.bytes);
  EXPECT_EQ(first.scale.bytes, scale);
}

TEST(Dequantize, GivesTheNumbers) {
  std::mt19937_64 random(seed());
  for (const DType format : kFormats) {
    std::vector<float> x(2 * 5 * 3 * 64), y(x.size());
    for (float& one : x) one = static_cast<float>(normal(random));
    const ConstTensor t = ConstTensor::of(std::span<const float>(x), {2, 5, 3, 64});
    const ScaleKind kind = scaled_inside(format) ? ScaleKind::kNone : ScaleKind::kGroups;
    const Coded coded = Coded::of(t, format, kind, has_zero_point(format), DType::kF32, 32);
    dequantize({.codes = coded.codes.t,
                .scale = coded.scale.t,
                .zero_point = coded.zero_point.t,
                .x = Tensor::of(std::span(y), {2, 5, 3, 64})});
    const std::vector<double> want = coded.numbers();
    for (size_t i = 0; i < y.size(); ++i) {
      EXPECT_NEAR(y[i], want[i], 1e-6 * (1 + std::fabs(want[i]))) << name_of(format);
    }
  }
}

// ---- on every device ----

class Quantizing : public EveryEngine {
 protected:
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[random_() % all.size()];
  }

  /// Numbers of a tensor, some of which are infinite or none at all.
  void draw(const Tensor& t, bool odd_ones) {
    const double scale = one_of({1e-5, 1.0, 1e4}), mean = one_of({0.0, 0.0, 3.0});
    for (int64_t i = 0; i < t.numel(); ++i) {
      double x = (normal(random_) + mean) * scale;
      if (odd_ones && random_() % 61 == 0) x = one_of<double>({0, -0.0, kInf, -kInf, kNan});
      store(t.data, t.dtype, i, x);
    }
  }

  std::mt19937_64 random_{seed()};
};

TEST_P(Quantizing, GivesTheSameBits) {
  using K = ScaleKind;
  for (int n = 0; n < 40; ++n) {
    const DType format = kFormats[n % std::size(kFormats)];
    const DType dtype = one_of({DType::kF32, DType::kBF16, DType::kF16});
    const int64_t b = one_of<int64_t>({1, 3}), s = one_of<int64_t>({1, 7, 70}),
                  h = one_of<int64_t>({1, 2, 5}), d = one_of<int64_t>({32, 64, 96, 256});
    const K kind = scaled_inside(format) ? K::kNone
                                         : one_of({K::kNone, K::kTensor, K::kHeads,
                                                   K::kSequencesAndHeads, K::kRows, K::kGroups});
    const bool zero = kind != K::kNone && has_zero_point(format) && random_() % 2 == 0;
    const bool fixed = kind != K::kNone && random_() % 4 == 0, odd_ones = random_() % 3 == 0;
    const bool means = n % 3 > 0, fixed_mean = n % 3 == 1;
    SCOPED_TRACE(testing::Message()
                 << "seed " << seed() << " draw " << n << " " << name_of(format) << " of "
                 << name_of(dtype) << " " << b << "x" << s << "x" << h << "x" << d << " scales "
                 << static_cast<int>(kind) << zero << fixed << odd_ones << " means " << n % 3);
    Buffer x(dtype, {b, s, h, d}), numbers(dtype, {b, s, h, d});
    draw(x.t, odd_ones);
    // By the host; its scales are those that are given, or else are there to be written again.
    Coded want = Coded::of(x.t, format, kind, zero, one_of({DType::kF32, DType::kF16}), 32);
    Buffer want_mean, mean;
    if (means) {
      want_mean = Buffer(DType::kF32, {fixed_mean ? 1 : b, h, d});
      if (fixed_mean) draw(want_mean.t, odd_ones);
      mean = Buffer(DType::kF32, {fixed_mean ? 1 : b, h, d});
      if (fixed_mean) mean.bytes = want_mean.bytes, mean.t.data = mean.bytes.data();
    }
    quantize({x.t, want.codes.t, want.scale.t, want.zero_point.t, false, want_mean.t, fixed_mean});
    dequantize({want.codes.t, want.scale.t, want.zero_point.t, numbers.t, want_mean.t});
    const auto like = [&](const Buffer& one) {
      Buffer other;
      if (one.t.given()) {
        const auto& shape = one.t.shape;
        other = Buffer(one.t.dtype, std::vector(shape.begin(), shape.begin() + one.t.rank));
      }
      if (fixed) std::copy(one.bytes.begin(), one.bytes.end(), other.bytes.begin());
      return other;
    };
    Buffer codes(format, {b, s, h, d}),
        scale = like(want.scale), zero_point = like(want.zero_point), back(dtype, {b, s, h, d});
    EngineMemory memory(engine());
    for (Buffer* const one : {&x, &codes, &scale, &zero_point, &back, &mean})
      memory.keep(std::as_writable_bytes(std::span(one->bytes)));
    const auto at = [&](Buffer& one) { return one.t.given() ? memory.at(one.t) : Tensor{}; };
    const Tensor to = at(codes), by = at(scale), zeros = at(zero_point), less = at(mean);
    quantize({at(x), to, by, zeros, fixed, less, fixed_mean});
    dequantize({to, by, zeros, at(back), less});
    memory.bring_back();
    ASSERT_EQ(mean.bytes, want_mean.bytes);
    ASSERT_EQ(codes.bytes, want.codes.bytes);
    ASSERT_EQ(scale.bytes, want.scale.bytes);
    ASSERT_EQ(zero_point.bytes, want.zero_point.bytes);
    for (int64_t i = 0; i < back.t.numel(); ++i) {
      const double one = load(back.t.data, dtype, i), other = load(numbers.t.data, dtype, i);
      ASSERT_TRUE(one == other || (std::isnan(one) && std::isnan(other)))
          << i << ": " << one << " and " << other;
    }
  }
}

TEST_P(Quantizing, ScalesOfNoRowsAreZero) {
  struct Shapes {
    std::vector<int64_t> x, scale, mean;
  };
  const std::initializer_list<Shapes> all = {
      {{2, 0, 3, 32}, {1}, {2, 3, 32}},    {{2, 0, 3, 32}, {2, 3}, {2, 3, 32}},
      {{2, 0, 3, 32}, {1, 3}, {}},         {{0, 3, 32}, {1, 3}, {1, 3, 32}},
      {{0, 5, 3, 32}, {1}, {0, 3, 32}},    {{0, 5, 3, 32}, {1, 3}, {}},
      {{0, 5, 3, 32}, {0, 3}, {0, 3, 32}}, {{2, 0, 3, 32}, {2, 0, 3, 1}, {2, 3, 32}}};
  for (const Shapes& shapes : all) {
    SCOPED_TRACE(testing::PrintToString(shapes.x) + testing::PrintToString(shapes.scale));
    Buffer x(DType::kF32, shapes.x), codes(DType::kInt8, shapes.x),
        scale(DType::kF32, shapes.scale), zero_point(DType::kF32, shapes.scale), mean;
    if (!shapes.mean.empty()) mean = Buffer(DType::kF32, shapes.mean);
    EngineMemory memory(engine());
    for (Buffer* const one : {&x, &codes, &scale, &zero_point, &mean}) {
      std::fill(one->bytes.begin(), one->bytes.end(), uint8_t{0x7f});
      memory.keep(std::as_writable_bytes(std::span(one->bytes)));
    }
    const auto at = [&](Buffer& one) { return one.t.given() ? memory.at(one.t) : Tensor{}; };
    quantize({at(x), at(codes), at(scale), at(zero_point), false, at(mean)});
    memory.bring_back();
    for (const Buffer* const one : {&scale, &zero_point, &mean})
      EXPECT_EQ(one->bytes, std::vector<uint8_t>(one->bytes.size(), 0));
  }
}

TEST_P(Quantizing, TensorsAreOnOneDevice) {
  Buffer x(DType::kF64, {1, 2, 1, 32}), codes(DType::kInt8, {1, 2, 1, 32});
  EngineMemory memory(engine());
  for (Buffer* const one : {&x, &codes}) memory.keep(std::as_writable_bytes(std::span(one->bytes)));
  const Tensor there = memory.at(x.t);
  if (there.device.type == DeviceType::kCpu) return;
  EXPECT_EQ(message_of([&] {
              quantize({there, memory.at(codes.t)});
            }),
            "x: got f64, quantize on cuda takes none of it");
  EXPECT_EQ(message_of([&] { quantize({there, codes.t}); }), "codes: on cpu, want cuda:0 as x");
}

FULGUR_EVERY_ENGINE(Quantizing);

// ---- attention over codes ----

class QuantizedAttention : public EveryEngine {
 protected:
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[random_() % all.size()];
  }

  ScaleKind kind_of(DType format, bool packed) {
    if (scaled_inside(format)) return ScaleKind::kNone;
    using K = ScaleKind;
    if (packed) return one_of({K::kTensor, K::kHeads, K::kRows, K::kGroups});
    return one_of({K::kNone, K::kTensor, K::kHeads, K::kSequencesAndHeads, K::kRows, K::kGroups});
  }

  /// Quantizes a tensor of the workload, which gets the numbers of the codes.
  Coded quantized(const Tensor& t, DType format, ScaleKind kind) {
    std::vector<double> x = read(t);
    // A NaN of a row that is none would spoil the scale of all.
    for (double& one : x)
      one = std::isnan(one) ? 2.5 : kind == ScaleKind::kNone ? one : 3 * one + 0.5;
    write(t, x);
    const bool zero = kind != ScaleKind::kNone && has_zero_point(format) && random_() % 2 == 0;
    Coded coded = Coded::of(t, format, kind, zero, one_of({DType::kF32, DType::kF16}), 32);
    write(t, coded.numbers());
    return coded;
  }

  std::mt19937_64 random_{seed()};
};

TEST_P(QuantizedAttention, IsThatOfTheNumbers) {
  for (int draw = 0; draw < 48; ++draw) {
    Case c;
    c.batch = one_of<int64_t>({1, 2, 3});
    c.sq = one_of<int64_t>({1, 1, 2, 5, 33});
    c.sk = one_of<int64_t>({7, 64, 150});
    c.hk = one_of<int64_t>({1, 2});
    c.hq = c.hk * one_of<int64_t>({1, 3, 4, 8});
    c.d = one_of<int64_t>({32, 64, 96, 128, 192});
    c.dv = one_of<int64_t>({32, 64, 128});
    c.mask = one_of({full(), causal(), window(20, 3), chunked(16, causal())});
    c.softcap = one_of({0.0, 0.0, 5.0});
    c.alibi = one_of({Alibi::kNone, Alibi::kNone, Alibi::kHeads});
    c.sinks = random_() % 3 == 0;
    c.dropout = one_of({0.0, 0.0, 0.2});
    c.bias = one_of({Bias::kNone, Bias::kNone, Bias::kHeads});
    const int64_t page = one_of<int64_t>({0, 0, 1, 5, 16, 64});
    const bool packed = page == 0 && random_() % 4 == 0;
    c.layout = packed ? Layout::kPacked : Layout::kBshd;
    c.seqused = page > 0;
    if (page > 0) c.bias = Bias::kNone;  // a table has room for more keys
    const DType k_format = kFormats[random_() % std::size(kFormats)];
    const DType v_format = kFormats[random_() % std::size(kFormats)];
    SCOPED_TRACE(testing::Message() << "draw " << draw << " " << c.name() << " page " << page << " "
                                    << name_of(k_format) << " " << name_of(v_format));
    Workload w(c, random_());
    // A row of K in one format, and of V in another, or both as they are.
    ForwardTensors call = w.forward;
    Descales descales;
    Coded k, v;
    const bool plain_k = random_() % 8 == 0, plain_v = random_() % 8 == 0;
    if (!plain_k) {
      k = quantized(w.forward.k, k_format, kind_of(k_format, packed));
      call.k = k.codes.t;
      descales.k_descale = k.scale.t;
      descales.k_zero_point = k.zero_point.t;
    }
    if (!plain_v) {
      v = quantized(w.forward.v, v_format, kind_of(v_format, packed));
      call.v = v.codes.t;
      descales.v_descale = v.scale.t;
      descales.v_zero_point = v.zero_point.t;
    }
    w.seal();
    const Expected e = expect_forward(w);

    std::vector<int32_t> table;
    Buffer paged[6];
    if (page > 0) {
      const int64_t pages = (c.sk + page - 1) / page, all = c.batch * pages + 2;
      std::vector<int32_t> order(static_cast<size_t>(all));
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::shuffle(order.begin(), order.end(), random_);
      std::vector<std::vector<int32_t>> ids(static_cast<size_t>(c.batch));
      for (auto& of : ids) {
        for (int64_t i = 0; i < pages; ++i, order.pop_back()) of.push_back(order.back());
        table.insert(table.end(), of.begin(), of.end());
      }
      call.page_table = Tensor::of(std::span(table), {c.batch, pages});
      const auto move = [&](Buffer& to, const Buffer& from, auto& member) {
        if (!from.t.given() || from.t.rank < 4) return;
        to = in_pages(from, page, all, ids);
        member = to.t;
      };
      const auto plain = [&](Buffer& to, Tensor& member) {
        Buffer from(member.dtype, {c.batch, c.sk, c.hk, member.shape[3]});
        write(from.t, read(member));
        to = in_pages(from, page, all, ids);
        member = to.t;
      };
      if (plain_k) plain(paged[0], call.k);
      if (plain_v) plain(paged[1], call.v);
      move(paged[0], k.codes, call.k);
      move(paged[1], v.codes, call.v);
      move(paged[2], k.scale, descales.k_descale);
      move(paged[3], k.zero_point, descales.k_zero_point);
      move(paged[4], v.scale, descales.v_descale);
      move(paged[5], v.zero_point, descales.v_zero_point);
    }
    ForwardArgs args = call;
    args.descales = descales;
    Options options = w.options;
    options.engine = engine();
    if (!computes([&] { forward(args, options, w.run_options); })) continue;
    ASSERT_TRUE(forward_is_right(w, e));
    ASSERT_TRUE(w.check_memory());
  }
}

TEST_P(QuantizedAttention, TakesQueriesOf16And8Bits) {
  for (int draw = 0; draw < 16; ++draw) {
    Case c;
    c.batch = 2;
    c.sq = one_of<int64_t>({1, 3, 40});
    c.sk = one_of<int64_t>({5, 100});
    c.hk = 2;
    c.hq = one_of<int64_t>({2, 8});
    c.d = c.dv = 64;
    c.mask = causal();
    const DType format = kFormats[random_() % std::size(kFormats)];
    const DType q_type = one_of({DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2});
    const bool q_codes = q_type == DType::kE4M3 || q_type == DType::kE5M2;
    const DType out = q_codes ? one_of({DType::kBF16, DType::kF16, DType::kF32}) : q_type;
    SCOPED_TRACE(testing::Message() << "draw " << draw << " " << c.name() << " " << name_of(format)
                                    << " q " << name_of(q_type) << " out " << name_of(out));
    Workload w(c, random_());
    Coded q;
    Buffer plain_q;
    ForwardTensors call = w.forward;
    Descales descales;
    if (q_codes) {
      q = Coded::of(w.forward.q, q_type, one_of({ScaleKind::kTensor, ScaleKind::kRows}), false,
                    DType::kF32, 64);
      if (random_() % 2 == 0 && c.hq == c.hk) {
        q = Coded::of(w.forward.q, q_type, ScaleKind::kSequencesAndHeads, false, DType::kF32, 64);
      }
      write(w.forward.q, q.numbers());
      call.q = q.codes.t;
      descales.q_descale = q.scale.t;
    } else {
      plain_q = Buffer(q_type, {c.batch, c.sq, c.hq, c.d});
      write(plain_q.t, read(w.forward.q));
      write(w.forward.q, read(plain_q.t));
      call.q = plain_q.t;
    }
    const Coded k = quantized(w.forward.k, format, kind_of(format, false));
    const Coded v = quantized(w.forward.v, format, kind_of(format, false));
    call.k = k.codes.t;
    call.v = v.codes.t;
    descales.k_descale = k.scale.t;
    descales.v_descale = v.scale.t;
    descales.k_zero_point = k.zero_point.t;
    descales.v_zero_point = v.zero_point.t;
    Buffer result(out, {c.batch, c.sq, c.hq, c.dv});
    call.out = result.t;
    w.seal();
    const Expected e = expect_forward(w);
    ForwardArgs args = call;
    args.descales = descales;
    Options options = w.options;
    options.engine = engine();
    if (!computes([&] { forward(args, options); })) continue;
    ASSERT_TRUE(within("out", call.out, e.reference.out, e.naive.out, 2, 1e-5 * e.unit.out));
  }
}

// What scales of 0, denormal ones, infinities and NaN give is what the numbers give.
TEST_P(QuantizedAttention, ScalesMayBeAnything) {
  for (const float scale : {0.0f, 1e-42f, -2.0f, 1e35f, kInf, kNan}) {
    for (const int64_t sq : {1, 40}) {
      Case c;
      c.sq = sq;
      c.sk = 70;
      c.hq = 4;
      c.mask = causal();
      Workload w(c, 1);
      Coded v = Coded::of(w.forward.v, DType::kInt8, ScaleKind::kRows, false, DType::kF32, 64);
      // The scale of the last key, which only the last query sees.
      store(v.scale.t.data, DType::kF32, 69, scale);
      write(w.forward.v, v.numbers());
      w.seal();
      ForwardArgs args = w.forward;
      Options options = w.options;
      options.engine = engine();
      if (!computes([&] { forward(args, options); })) continue;
      const std::vector<double> want = read(w.forward.out);
      args.v = v.codes.t;
      args.descales.v_descale = v.scale.t;
      forward(args, options);
      const std::vector<double> got = read(w.forward.out);
      for (size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "scale " << scale << " sq " << sq << " element " << i);
        if (std::isfinite(want[i])) {
          ASSERT_NEAR(got[i], want[i], 1e-5 * (1 + std::fabs(want[i])));
        } else {
          ASSERT_FALSE(std::isfinite(got[i]));
        }
      }
    }
  }
}

FULGUR_CPU_MEMORY_ENGINES(QuantizedAttention);

// ---- append ----

// New rows become the codes and scales that quantize() makes of them, all else keeps its bits, and
// a call that appends and attends gives what both calls do.
TEST(QuantizedAppend, QuantizesTheNewRows) {
  std::mt19937_64 random(seed());
  constexpr int64_t kBatch = 2, kRows = 12, kNew = 3, kHeads = 2, kDim = 64, kPairs = 16;
  const std::vector<int64_t> cache_shape{kBatch, kRows, kHeads, kDim};
  std::vector<int32_t> old{4, 9};
  const Tensor lengths = Tensor::of(std::span(old), {kBatch});
  for (const DType format : kFormats) {
    using K = ScaleKind;
    for (const ScaleKind kind : {K::kNone, K::kSequencesAndHeads, K::kRows, K::kGroups}) {
      if (kind != K::kNone && scaled_inside(format)) continue;
      for (int n = 0; n < 8; ++n) {
        const bool rotates = n % 2 == 1, by_hadamard = n / 2 % 2 == 1, means = n / 4 == 1;
        SCOPED_TRACE(testing::Message() << name_of(format) << " " << static_cast<int>(kind)
                                        << rotates << by_hadamard << means);
        const DType rows = rotates ? DType::kF32 : DType::kBF16;
        const bool zero = kind != K::kNone && has_zero_point(format);
        const auto numbers = [&](DType dtype, std::vector<int64_t> shape) {
          Buffer b(dtype, std::move(shape));
          randomize(b.t, random);
          return b;
        };
        const Buffer before = numbers(rows, cache_shape);
        const Buffer k_new = numbers(rows, {kBatch, kNew, kHeads, kDim});
        const Buffer v_new = numbers(rows, {kBatch, kNew, kHeads, kDim});
        const Buffer cos = numbers(DType::kF32, {kRows, kPairs}),
                     sin = numbers(DType::kF32, {kRows, kPairs});
        Coded k = Coded::of(before.t, format, kind, zero, DType::kF32, 32), v = k;
        v.codes.t.data = v.codes.bytes.data();  // copies have memory of their own
        v.scale.t.data = v.scale.bytes.data();
        v.zero_point.t.data = v.zero_point.bytes.data();
        const Coded first = k;
        const Buffer mean =
            means ? numbers(DType::kF32, {n == 4 ? 1 : kBatch, kHeads, kDim}) : Buffer();
        const Options options{.mask = causal(), .hadamard = by_hadamard};

        // What is to come: the rows as a cache of numbers holds them, quantized.
        Buffer k_numbers = before, v_numbers = before;
        k_numbers.t.data = k_numbers.bytes.data();
        v_numbers.t.data = v_numbers.bytes.data();
        AppendArgs args{.rows = {.k_cache = k_numbers.t,
                                 .v_cache = v_numbers.t,
                                 .k_new = k_new.t,
                                 .v_new = v_new.t,
                                 .cache_seqlens = lengths}};
        if (rotates) args.rows.rotary = {cos.t, sin.t};
        append(args);
        const auto expected = [&](const Buffer& of, bool key) {
          Buffer rotated(DType::kF32, cache_shape);
          if (key && by_hadamard) hadamard({of.t, rotated.t});
          Coded want = first;
          want.codes.t.data = want.codes.bytes.data();
          want.scale.t.data = want.scale.bytes.data();
          want.zero_point.t.data = want.zero_point.bytes.data();
          const bool fixed = kind == K::kSequencesAndHeads;
          quantize({.x = key && by_hadamard ? rotated.t : of.t,
                    .codes = want.codes.t,
                    .scale = want.scale.t,
                    .zero_point = want.zero_point.t,
                    .static_scale = fixed,
                    .mean = key ? mean.t : Tensor{},
                    .static_mean = true});
          // Only the new rows.
          const auto keep = [&](Buffer& to, const Buffer& from) {
            if (to.t.rank != 4) return;
            const size_t row = to.bytes.size() / (kBatch * kRows);
            for (int64_t i = 0; i < kBatch * kRows; ++i) {
              const int64_t at = i % kRows - old[static_cast<size_t>(i / kRows)];
              if (at >= 0 && at < kNew) continue;
              std::copy_n(from.bytes.begin() + i * static_cast<int64_t>(row), row,
                          to.bytes.begin() + i * static_cast<int64_t>(row));
            }
          };
          keep(want.codes, first.codes);
          keep(want.scale, first.scale);
          keep(want.zero_point, first.zero_point);
          return want;
        };
        const Coded k_want = expected(k_numbers, true), v_want = expected(v_numbers, false);

        args.rows.k_cache = k.codes.t;
        args.rows.v_cache = v.codes.t;
        args.rows.k_cache_descale = k.scale.t;
        args.rows.v_cache_descale = v.scale.t;
        args.rows.k_cache_zero_point = k.zero_point.t;
        args.rows.v_cache_zero_point = v.zero_point.t;
        args.rows.k_cache_mean = mean.t;
        append(args, options);
        for (const auto& [got, want] : {std::pair{&k, &k_want}, std::pair{&v, &v_want}}) {
          ASSERT_EQ(got->codes.bytes, want->codes.bytes);
          ASSERT_EQ(got->scale.bytes, want->scale.bytes);
          ASSERT_EQ(got->zero_point.bytes, want->zero_point.bytes);
        }
        ASSERT_NE(k.codes.bytes, first.codes.bytes);

        // Both in one call, of caches as they were.
        std::vector<int32_t> now{old[0] + static_cast<int32_t>(kNew),
                                 old[1] + static_cast<int32_t>(kNew)};
        const Buffer q = numbers(rows, {kBatch, kNew, 4, kDim});
        Buffer apart(rows, {kBatch, kNew, 4, kDim}), together(rows, {kBatch, kNew, 4, kDim});
        Buffer turned(rows, {kBatch, kNew, 4, kDim});
        if (rotates) {
          args.q = q.t;
          args.q_out = turned.t;
          append(args, options);
        }
        forward({.q = rotates ? turned.t : q.t,
                 .k = k.codes.t,
                 .v = v.codes.t,
                 .out = apart.t,
                 .lengths = {.seqused_k = Tensor::of(std::span(now), {kBatch})},
                 .descales = {{}, k.scale.t, v.scale.t, k.zero_point.t, v.zero_point.t, mean.t}},
                options);
        std::copy(first.codes.bytes.begin(), first.codes.bytes.end(), k.codes.bytes.begin());
        std::copy(first.codes.bytes.begin(), first.codes.bytes.end(), v.codes.bytes.begin());
        args.q = {};
        forward({.q = q.t, .out = together.t, .append = args.rows}, options);
        ASSERT_EQ(together.bytes, apart.bytes);
        ASSERT_EQ(k.codes.bytes, k_want.codes.bytes);
      }
    }
  }
}

// ---- C ----

TEST(QuantizeInC, TakesBytesByTheNameOfTheirFormat) {
  std::mt19937_64 random(seed());
  Buffer x(DType::kF32, {1, 5, 2, 32}), q = x, bytes(DType::kU8, {1, 5, 2, 18});
  Buffer out(DType::kF32, {1, 5, 2, 32}), want = out, back = out;
  for (Buffer* b : {&q, &want, &back}) b->t.data = b->bytes.data();
  randomize(x.t, random);
  randomize(q.t, random);
  const Dl x_c(x.t), bytes_c(bytes.t), q_c(q.t), out_c(out.t), back_c(back.t);
  fulgur_quantize_args args{};
  args.struct_size = sizeof args;
  args.x = x_c;
  args.codes = bytes_c;
  args.format = "q4_0";
  ASSERT_EQ(fulgur_quantize(&args, nullptr), FULGUR_OK) << fulgur_last_error();
  args.x = back_c;
  ASSERT_EQ(fulgur_dequantize(&args, nullptr), FULGUR_OK) << fulgur_last_error();

  fulgur_descales descales{};
  descales.struct_size = sizeof descales;
  descales.k_format = descales.v_format = "q4_0";
  fulgur_forward_args call{};
  call.struct_size = sizeof call;
  call.q = q_c;
  call.k = call.v = bytes_c;
  call.out = out_c;
  call.descales = &descales;
  ASSERT_EQ(fulgur_forward(&call, nullptr, nullptr), FULGUR_OK) << fulgur_last_error();
  forward({.q = q.t, .k = back.t, .v = back.t, .out = want.t});
  const std::vector<double> got = read(out.t), expected = read(want.t);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5);

  descales.k_format = "q4";
  EXPECT_EQ(fulgur_forward(&call, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fulgur_last_error()).rfind("format: got \"q4\", want one of e4m3", 0), 0u);
}

// ---- errors ----

struct Wrong {
  const char* what;
  std::function<void(ForwardArgs&)> change;
  const char* message;
};

// q (2, 3, 4, 64), k and v (2, 10, 2, 64).
TEST(QuantizedErrors, NameTheArgument) {
  static float numbers[2 * 10 * 4 * 64];
  const auto of = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(numbers, dtype, shape);
  };
  const DType f32 = DType::kF32;
  const std::vector<Wrong> wrongs = {
      {"q",
       [&](ForwardArgs& a) {
         a.q = of(DType::kInt8, {2, 3, 4, 64});
       },
       "q: got int8, want f32.*"},
      {"bytes",
       [&](ForwardArgs& a) {
         a.k = of(DType::kU8, {2, 10, 2, 68});
       },
       "k: got u8, want f32.*low-bit.*"},
      {"block",
       [&](ForwardArgs& a) {
         a.q = of(f32, {2, 3, 4, 48});
         a.k = of(DType::kQ4_0, {2, 10, 2, 48});
       },
       "k: got head dim 48, want a multiple of 32, the block of q4_0"},
      {"strides",
       [&](ForwardArgs& a) {
         Tensor k = of(DType::kQ8_0, {2, 10, 2, 64});
         k.strides[1] = 130;
         a.k = k;
       },
       "k: got strides .*, want multiples of 32, the block of q8_0"},
      {"descale_of_blocks",
       [&](ForwardArgs& a) {
         a.k = of(DType::kQ8_0, {2, 10, 2, 64});
         a.descales.k_descale = of(f32, {1});
       },
       "k_descale: given with q8_0, whose blocks have scales"},
      {"descale_of_floats", [&](ForwardArgs& a) { a.descales.v_descale = of(f32, {1}); },
       "v_descale: given with v of f32, want it with codes.*"},
      {"shape",
       [&](ForwardArgs& a) {
         a.k = of(DType::kInt8, {2, 10, 2, 64});
         a.descales.k_descale = of(f32, {2, 4});
       },
       "k_descale: got shape \\(2, 4\\), want \\(1\\), \\(2 or 1, 2 or 1\\).*"},
      {"rows",
       [&](ForwardArgs& a) {
         a.k = of(DType::kInt8, {2, 10, 2, 64});
         a.descales.k_descale = of(f32, {2, 9, 2, 1});
       },
       "k_descale: got shape.*\\(2, 10, 2, 64\\) of k.*"},
      {"groups",
       [&](ForwardArgs& a) {
         a.v = of(DType::kInt4, {2, 10, 2, 64});
         a.descales.v_descale = of(f32, {2, 10, 2, 8});
       },
       "v_descale: got 8 groups of the 64 columns of v, want 1, or groups of a multiple of 16"},
      {"dtype",
       [&](ForwardArgs& a) {
         a.k = of(DType::kE4M3, {2, 10, 2, 64});
         a.descales.k_descale = of(DType::kBF16, {1});
       },
       "k_descale: got bf16, want f32 or f16"},
      {"zero_point_of_floats",
       [&](ForwardArgs& a) {
         a.k = of(DType::kE4M3, {2, 10, 2, 64});
         a.descales.k_descale = a.descales.k_zero_point = of(f32, {1});
       },
       "k_zero_point: given with k of e4m3, want it with int8 or int4"},
      {"zero_point_alone",
       [&](ForwardArgs& a) {
         a.k = of(DType::kInt8, {2, 10, 2, 64});
         a.descales.k_zero_point = of(f32, {1});
       },
       "k_zero_point: given without k_descale"},
      {"zero_point_of_another_shape",
       [&](ForwardArgs& a) {
         a.k = of(DType::kInt8, {2, 10, 2, 64});
         a.descales.k_descale = of(f32, {2, 2});
         a.descales.k_zero_point = of(f32, {1, 2});
       },
       "k_zero_point: got shape .*, want \\(2, 2\\) of k_descale"},
      {"mean_of_floats",
       [&](ForwardArgs& a) {
         a.descales.k_mean = of(f32, {2, 2, 64});
       },
       "k_mean: given with k of f32, want it with codes.*"},
      {"mean",
       [&](ForwardArgs& a) {
         a.k = of(DType::kInt8, {2, 10, 2, 64});
         a.descales.k_mean = of(f32, {2, 4, 64});
       },
       "k_mean: got shape \\(2, 4, 64\\), want \\(2, 2, 64\\).*"},
      {"mean_of_16_bits",
       [&](ForwardArgs& a) {
         a.k = of(DType::kInt8, {2, 10, 2, 64});
         a.descales.k_mean = of(DType::kF16, {1, 2, 64});
       },
       "k_mean: got f16, want f32.*"},
      {"out",
       [&](ForwardArgs& a) {
         a.q = of(DType::kE4M3, {2, 3, 4, 64});
         a.out = of(DType::kF64, {2, 3, 4, 64});
       },
       "out: got f64, want f32 .*"},
  };
  for (const Wrong& wrong : wrongs) {
    ForwardArgs args{.q = of(f32, {2, 3, 4, 64}),
                     .k = of(f32, {2, 10, 2, 64}),
                     .v = of(f32, {2, 10, 2, 64}),
                     .out = of(f32, {2, 3, 4, 64})};
    wrong.change(args);
    const auto call = [&] { forward(args); };
    const std::string message = message_of(call);
    EXPECT_TRUE(std::regex_match(message, std::regex(wrong.message)))
        << wrong.what << ": " << message;
    EXPECT_EQ(status_of(call), Status::kInvalidArgument) << wrong.what;
  }
}

TEST(QuantizedErrors, OfRotatedKeysAndMeans) {
  static float numbers[2 * 10 * 4 * 64];
  const auto of = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(numbers, dtype, shape);
  };
  const DType f32 = DType::kF32;
  const Tensor rows = of(f32, {2, 10, 2, 64}), codes = of(DType::kInt8, {2, 10, 2, 64});
  const Tensor mean = of(f32, {1, 2, 64});
  const ForwardArgs args{
      .q = of(f32, {2, 3, 4, 64}), .k = codes, .v = rows, .out = of(f32, {2, 3, 4, 64})};
  ForwardArgs less = args;
  less.descales.k_mean = mean;
  less.alibi_slopes = of(f32, {4});
  EXPECT_EQ(status_of([&] { plan(less, {.softcap = 3}); }), Status::kUnsupported);
  EXPECT_EQ(message_of([&] { plan(less, {.softcap = 3}); }),
            "k_mean: given with softcap and alibi_slopes, want one of them: both see scores that "
            "have their means");
  ForwardArgs floats = args;
  floats.k = rows;
  EXPECT_EQ(message_of([&] { plan(floats, {.hadamard = true}); }),
            "hadamard: given with k of f32, want codes of a low-bit format");
  std::vector<int32_t> lengths{3, 4};
  AppendArgs append_args{.rows = {.k_cache = rows,
                                  .v_cache = rows,
                                  .k_new = of(f32, {2, 1, 2, 64}),
                                  .v_new = of(f32, {2, 1, 2, 64}),
                                  .cache_seqlens = Tensor::of(std::span(lengths), {2})}};
  EXPECT_EQ(message_of([&] { append(append_args, {.hadamard = true}); }),
            "hadamard: given with k_cache of f32, want codes of a low-bit format");
  append_args.rows.k_cache_mean = mean;
  EXPECT_EQ(message_of([&] { append(append_args); }),
            "k_cache_mean: given with k_cache of f32, want it with codes of a low-bit format");
  EXPECT_EQ(message_of([&] { quantize({.x = rows, .codes = codes, .mean = mean}); }),
            "mean: got one for 1 sequences, want 2 to write");
}

TEST(QuantizedErrors, BackwardTakesNoCodes) {
  static float numbers[4096];
  const Tensor t = Tensor::contiguous(numbers, DType::kF32, {1, 4, 2, 32});
  BackwardArgs args{.dout = t, .q = t, .k = t, .v = t, .out = t, .dq = t, .dk = t, .dv = t};
  args.k = Tensor::contiguous(numbers, DType::kQ8_0, {1, 4, 2, 32});
  EXPECT_EQ(message_of([&] { backward(args); }),
            "k: got q8_0, want f32, bf16, f16 or f64: the backward pass takes no low-bit tensors");
}

TEST(QuantizedErrors, OfQuantize) {
  static float numbers[4096];
  static uint8_t memory[4096];
  const Tensor x = Tensor::contiguous(numbers, DType::kF32, {1, 4, 2, 32});
  const auto codes = [](DType dtype) { return Tensor::contiguous(memory, dtype, {1, 4, 2, 32}); };
  const auto message = [](const QuantizeArgs& args) { return message_of([&] { quantize(args); }); };
  EXPECT_EQ(message({.x = Tensor::contiguous(numbers, DType::kF32, {8, 32}),
                     .codes = codes(DType::kInt8)}),
            "x: got f32 (8, 32), want (batch, seqlen, heads, dim) or (total, heads, dim)");
  EXPECT_EQ(message({.x = x, .codes = codes(DType::kBF16)}),
            "codes: got bf16, want a low-bit format");
  EXPECT_EQ(message({.x = x, .codes = codes(DType::kQ8_0), .scale = x}),
            "scale: given with q8_0, whose blocks have scales");
  EXPECT_EQ(message({.x = x, .codes = Tensor::contiguous(numbers, DType::kInt8, {1, 4, 2, 32})}),
            "codes: shares its memory with x; an output needs its own");
  EXPECT_EQ(message_of([] { format_named("q3"); }),
            "format: got \"q3\", want one of e4m3, e5m2, int8, int4, q8_0, q4_0, q4_1, q5_0, q5_1, "
            "iq4_nl");
  EXPECT_EQ(message_of([] {
              Tensor::contiguous(memory, DType::kU8, {2, 33}).as(DType::kQ8_0, "k");
            }),
            "k: got rows of 33, want a multiple of the 34 bytes of a block of q8_0");
}

TEST(Bytes, AreReadAsAFormat) {
  static uint8_t memory[4096];
  Tensor bytes = Tensor::contiguous(memory, DType::kU8, {3, 2, 68});
  bytes.strides[0] = 340;
  const Tensor t = bytes.as(DType::kQ8_0);
  EXPECT_EQ(t.describe(), "q8_0 (3, 2, 64)");
  EXPECT_EQ(t.strides[0], 320);
  EXPECT_EQ(t.strides[1], 64);
  EXPECT_EQ(t.strides[2], 1);
}

}  // namespace
}  // namespace fulgur::test
