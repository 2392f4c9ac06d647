// Attention over parts of the keys, combined: as a sum in double precision says, whatever dtypes
// and strides the parts have.
#include "fulgur/merge.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <string>

#include "engine_memory.h"
#include "engines.h"
#include "storage.h"

namespace fulgur::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Merge : public EveryEngine {};

struct Shape {
  int64_t batch, rows, heads, dim;
  bool packed;  // then of batch 1
  bool gaps;    // between heads and between rows

  int64_t lines() const { return batch * rows * heads; }
};

// A tensor of the shape and its log-sum-exps, poison around them.
Merged tensors(std::deque<Storage>& memory, const Shape& s, DType dtype, DType lse_dtype) {
  const int64_t head = s.dim + (s.gaps ? 3 : 0), row = s.heads * head + (s.gaps ? 5 : 0);
  const std::array sizes{s.batch, s.rows, s.heads, s.dim};
  const std::array strides{s.rows * row, row, head, int64_t{1}};
  const int64_t lse_head = s.rows + (s.gaps ? 7 : 0);
  const std::array lse_sizes{s.batch, s.heads, s.rows};
  const std::array lse_strides{s.heads * lse_head, lse_head, int64_t{1}};
  const size_t skipped = s.packed ? 1 : 0;
  Merged made;
  made.out = memory.emplace_back(dtype, s.batch * s.rows * row)
                 .view(0, std::span(sizes).subspan(skipped), std::span(strides).subspan(skipped));
  made.lse =
      memory.emplace_back(lse_dtype, s.batch * s.heads * lse_head)
          .view(0, std::span(lse_sizes).subspan(skipped), std::span(lse_strides).subspan(skipped));
  return made;
}

// The log-sum-exps of a part: of all sizes, and some of rows that saw no key.
void draw_lse(const Tensor& lse, int part, std::mt19937_64& random) {
  randomize(lse, random, 3);
  std::vector<double> values = read(lse);
  for (size_t n = 0; n < values.size(); ++n) {
    if (n % 7 == 1) values[n] += 5000;
    if (n % 7 == 2) values[n] -= 5000;
    if (n % 5 == 3 && part % 2 == 0) values[n] = -kInf;
    if (n % 11 == 4) values[n] = -kInf;  // of all parts
  }
  write(lse, values);
}

// A number near `want`, rounded once; to 16 bits by way of f32.
testing::AssertionResult rounds(double want, double error, double got, DType dtype) {
  const auto round = [&](double x) {
    return rounded(size_of(dtype) == 2 ? rounded(x, DType::kF32) : x, dtype);
  };
  const double low = round(want - error), high = round(want + error);
  if ((got >= low && got <= high) || got == want) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "got " << got << ", want " << low << " to " << high;
}

void expect_sum(const Shape& s, const std::vector<Merged>& parts, const Merged& result) {
  std::vector<std::vector<double>> outs, lses;
  for (const Merged& part : parts) {
    outs.push_back(read(part.out));
    lses.push_back(read(part.lse));
  }
  const std::vector<double> out = read(result.out), lse = read(result.lse);
  for (int64_t line = 0; line < s.lines(); ++line) {
    const int64_t b = line / s.heads / s.rows, r = line / s.heads % s.rows, h = line % s.heads;
    const auto at = static_cast<size_t>((b * s.heads + h) * s.rows + r);
    long double most = -kInf, total = 0;
    for (const auto& each : lses) most = std::max<long double>(most, each[at]);
    for (const auto& each : lses) {
      if (each[at] != -kInf) total += std::exp(each[at] - most);
    }
    const auto want_lse = static_cast<double>(total == 0 ? -kInf : most + std::log(total));
    ASSERT_TRUE(rounds(want_lse, 1e-12 * std::fabs(want_lse), lse[at], result.lse.dtype)) << line;
    for (int64_t c = 0; c < s.dim; ++c) {
      const auto element = static_cast<size_t>(line * s.dim + c);
      long double sum = 0, size = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        if (lses[i][at] == -kInf) continue;
        const long double term = std::exp(lses[i][at] - most) / total * outs[i][element];
        sum += term;
        size += std::fabs(term);
      }
      ASSERT_TRUE(rounds(static_cast<double>(sum), static_cast<double>(1e-12 * size), out[element],
                         result.out.dtype))
          << "line " << line << ", column " << c;
    }
  }
}

TEST_P(Merge, IsTheSum) {
  const DType dtypes[] = {DType::kBF16, DType::kF32, DType::kF16, DType::kF64};
  const Shape shapes[] = {{2, 5, 3, 64, false, false}, {1, 9, 8, 128, true, false},
                          {2, 3, 2, 7, false, true},   {1, 4, 1, 512, true, true},
                          {3, 1, 33, 8, false, false}, {1, 6, 2, 264, false, false},
                          {1, 2, 300, 16, true, true}, {2, 2, 2, 1, false, false}};
  std::mt19937_64 random(1);
  int n = 0;
  for (const int count : {1, 2, 3, 17, 64}) {
    for (const Shape& s : shapes) {
      // All of one dtype; of two; f32 with the result's; f64, which GPUs do not take.
      for (int mixture = 0; mixture < 4; ++mixture, ++n) {
        SCOPED_TRACE("case " + std::to_string(n));
        std::deque<Storage> memory;
        const DType one = dtypes[n % 3], f64 = mixture == 3 ? DType::kF64 : DType::kF32;
        const DType other = mixture == 0 ? one : mixture == 1 ? dtypes[(n + 1) % 3] : f64;
        std::vector<Merged> parts;
        for (int i = 0; i < count; ++i) {
          const Merged part = parts.emplace_back(tensors(memory, s, i % 2 ? one : other, f64));
          randomize(part.out, random);
          draw_lse(part.lse, i, random);
          // What a part without a key holds does not count.
          std::vector<double> values = read(part.out);
          const std::vector<double> lse = read(part.lse);
          for (int64_t line = 0; line < s.lines(); ++line) {
            const int64_t b = line / s.heads / s.rows, r = line / s.heads % s.rows;
            const int64_t at = (b * s.heads + line % s.heads) * s.rows + r;
            if (lse[static_cast<size_t>(at)] == -kInf)
              std::fill_n(values.begin() + line * s.dim, s.dim, kNan);
          }
          write(part.out, values);
        }
        const Merged result = tensors(memory, s, one, f64);
        for (Storage& each : memory) each.seal();
        if (!computes([&] { compute(parts, result, engine()); })) continue;
        expect_sum(s, parts, result);
        for (const Storage& each : memory) {
          const bool written = Storage::around(result.out.data) == &each ||
                               Storage::around(result.lse.data) == &each;
          ASSERT_TRUE(written ? each.padding_unchanged() : each.all_unchanged());
        }
      }
    }
  }
}

TEST_P(Merge, GivesTheSameBitsAsAPartAndWithoutLse) {
  std::mt19937_64 random(11);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t dim : {7, 64}) {
      const Dense a(dtype, {2, 5, 3, dim}), b(dtype, {2, 5, 3, dim});
      Dense out(dtype, {2, 5, 3, dim});
      const Dense la(DType::kF32, {2, 3, 5}), lb(DType::kF32, {2, 3, 5}),
          lse(DType::kF32, {2, 3, 5});
      for (const Dense* t : {&a, &b, &la, &lb}) randomize(*t, random);
      compute({{a, la}, {b, lb}}, {out, lse}, engine());
      const auto want = bits(out), want_lse = bits(lse);
      out.storage().poison();
      compute({{a, la}, {b, lb}}, {out, {}}, engine());
      EXPECT_EQ(bits(out), want);
      compute({{a, la}, {b, lb}}, {b, lb}, engine());
      EXPECT_EQ(bits(b), want);
      EXPECT_EQ(bits(lb), want_lse);
    }
  }
}

TEST_P(Merge, WeighsByLse) {
  // Two keys: out_i = x_i with lse_i = log(w_i) give the weighted mean.
  const Dense a(DType::kF32, {1, 1, 1, 2}), b(DType::kF16, {1, 1, 1, 2});
  const Dense la(DType::kF32, {1, 1, 1}), lb(DType::kF32, {1, 1, 1});
  const Dense out(DType::kF32, {1, 1, 1, 2}), lse(DType::kF32, {1, 1, 1});
  write(a, std::vector{1.0, 10.0});
  write(b, std::vector{5.0, -10.0});
  write(la, std::vector{std::log(3.0)});
  write(lb, std::vector{std::log(1.0)});
  compute({{a, la}, {b, lb}}, {out, lse}, engine());
  const std::vector<double> got = read(out);
  EXPECT_NEAR(got[0], 2, 1e-6);
  EXPECT_NEAR(got[1], 5, 1e-6);
  EXPECT_NEAR(read(lse)[0], std::log(4.0), 1e-6);
}

// One row of nothing, one of nothing but one part.
TEST_P(Merge, EmptyPartsCountNothing) {
  const Dense a(DType::kF32, {1, 2, 1, 1}), b(DType::kF32, {1, 2, 1, 1});
  const Dense la(DType::kF32, {1, 1, 2}), lb(DType::kF32, {1, 1, 2});
  const Dense out(DType::kF32, {1, 2, 1, 1}), lse(DType::kF32, {1, 1, 2});
  write(a, std::vector{7.0, kNan});
  write(b, std::vector{9.0, 9.0});
  write(la, std::vector{-kInf, -kInf});
  write(lb, std::vector{2.5, -kInf});
  compute({{a, la}, {b, lb}}, {out, lse}, engine());
  EXPECT_EQ(read(out), (std::vector{9.0, 0.0}));
  EXPECT_EQ(read(lse), (std::vector{2.5, -kInf}));
}

TEST_P(Merge, MayBeEmpty) {
  const Tensor out = Tensor::contiguous(nullptr, DType::kF32, {2, 0, 3, 7});
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {2, 3, 0});
  compute({{out, lse}}, {out, lse}, engine());
  const Tensor nobody = Tensor::contiguous(nullptr, DType::kF32, {0, int64_t{1} << 60, 3, 7});
  compute({{nobody, Tensor::contiguous(nullptr, DType::kF32, {0, 3, int64_t{1} << 60})}},
          {nobody, {}}, engine());
}

// As in the call that made the parts: without values there would be rows of lse, and nothing
// written.
TEST(MergeSizes, HaveHeadsAndDims) {
  const auto message = [](int64_t heads, int64_t dim) -> std::string {
    const Tensor out = Tensor::contiguous(nullptr, DType::kF32, {1, 2, heads, dim});
    std::array<float, 6> numbers{};
    const Tensor lse = Tensor::contiguous(numbers.data(), DType::kF32, {1, heads, 2});
    const std::array parts{Partial{out, lse}};
    try {
      merge(parts, {out, lse});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(3, 0), "out: got head dim 0, want at least 1");
  EXPECT_EQ(message(0, 4), "out: got 0 heads, want at least 1");
}

FULGUR_EVERY_ENGINE(Merge);

}  // namespace
}  // namespace fulgur::test
