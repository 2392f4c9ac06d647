// Laws that exact attention obeys, whatever computes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine_memory.h"
#include "engines.h"
#include "fulgur/merge.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

constexpr DType kDtypes[] = {DType::kF32, DType::kBF16, DType::kF16};

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double bound) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t n = 0; n < got.size(); ++n) {
    if (std::isinf(want[n])) {
      ASSERT_EQ(got[n], want[n]) << "element " << n;
    } else {
      ASSERT_NEAR(got[n], want[n], bound) << "element " << n;
    }
  }
}

// Rows [begin, begin + count) of a (batch, seqlen, heads, dim) tensor.
Tensor rows(Tensor t, int64_t begin, int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + begin * t.strides[1] * size_of(t.dtype);
  t.shape[1] = count;
  return t;
}

// Half an ulp of the output, for results that may round either way, doubled for safety.
double ulp(DType dtype) {
  return dtype == DType::kF32 ? 4e-6 : dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10;
}

class Property : public EveryEngine {
 protected:
  /// Expects the same results of two calls, up to the rounding of `dtype`.
  void expect_same(Workload& a, Workload& b, DType dtype) {
    a.options.engine = b.options.engine = engine();
    if (!computes([&] { a.run_forward(); })) return;
    b.run_forward();
    expect_near(read(a.forward.out), read(b.forward.out), ulp(dtype));
    expect_near(read(a.forward.lse), read(b.forward.lse), 1e-5);
    if (!computes([&] { a.run_backward(); })) return;
    b.run_backward();
    expect_near(read(a.backward.dq), read(b.backward.dq), ulp(dtype));
    expect_near(read(a.backward.dk), read(b.backward.dk), ulp(dtype));
  }
};

TEST_P(Property, ShiftingScoresMovesOnlyTheLse) {
  // Another dimension adds the same number to all scores: q = 1, k = shift, scale = 1.
  const int64_t sq = 70, sk = 130, d = 16;
  for (const DType dtype : kDtypes) {
    for (const double shift : {-50.0, 3.0, 80.0}) {
      Workload w({.dtype = dtype, .sq = sq, .sk = sk, .d = d, .dv = d, .mask = causal()}, 1);
      w.options.engine = engine();
      w.options.scale = 1;
      if (!computes([&] { w.run_forward(); })) continue;
      Workload wide({.dtype = dtype, .sq = sq, .sk = sk, .d = d + 1, .dv = d, .mask = causal()}, 1);
      wide.options.engine = engine();
      wide.options.scale = 1;
      auto widen = [](const Tensor& to, const Tensor& from, double extra) {
        const auto narrow = read(from);
        std::vector<double> values;
        for (size_t n = 0; n < narrow.size(); ++n) {
          values.push_back(narrow[n]);
          if (n % d == d - 1) values.push_back(extra);
        }
        write(to, values);
      };
      widen(wide.forward.q, w.forward.q, 1);
      widen(wide.forward.k, w.forward.k, shift);
      write(wide.forward.v, read(w.forward.v));
      wide.seal();
      wide.run_forward();
      // Scores near 80 in f32; P and values up to 4, rounded.
      const double bound = dtype == DType::kF32 ? 1e-4 : 4 * ulp(dtype);
      expect_near(read(wide.forward.out), read(w.forward.out), bound);
      auto lse = read(w.forward.lse);
      for (double& x : lse) x += shift;
      expect_near(read(wide.forward.lse), lse, 5e-5);
    }
  }
}

TEST_P(Property, OrderOfKeysDoesNotMatter) {
  for (const DType dtype : kDtypes) {
    const int64_t sk = 200, d = 32;
    Workload w({.dtype = dtype, .sq = 50, .sk = sk, .d = d, .dv = d}, 2), shuffled(w.c, 2);
    w.options.engine = shuffled.options.engine = engine();
    std::vector<int64_t> order(sk);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 random(3);
    for (int64_t j = sk - 1; j > 0; --j) std::swap(order[j], order[random() % (j + 1)]);
    for (auto [from, to] :
         {std::pair{w.forward.k, shuffled.forward.k}, {w.forward.v, shuffled.forward.v}}) {
      for (int64_t j = 0; j < sk; ++j) write(rows(to, order[j], 1), read(rows(from, j, 1)));
    }
    shuffled.seal();
    if (!computes([&] { w.run_forward(); })) continue;
    shuffled.run_forward();
    expect_near(read(shuffled.forward.out), read(w.forward.out), 2 * ulp(dtype));
    expect_near(read(shuffled.forward.lse), read(w.forward.lse), 1e-5);
    if (!computes([&] { w.run_backward(); })) continue;
    shuffled.run_backward();
    expect_near(read(shuffled.backward.dq), read(w.backward.dq), 2 * ulp(dtype));
    for (int64_t j = 0; j < sk; ++j) {
      expect_near(read(rows(shuffled.backward.dk, order[j], 1)), read(rows(w.backward.dk, j, 1)),
                  2 * ulp(dtype));
      expect_near(read(rows(shuffled.backward.dv, order[j], 1)), read(rows(w.backward.dv, j, 1)),
                  2 * ulp(dtype));
    }
  }
}

TEST_P(Property, OutputIsLinearInV) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 70, .sk = 90, .mask = causal()}, 4);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) continue;
    auto out = read(w.forward.out), v = read(w.forward.v);
    for (double& x : v) x *= 4;
    write(w.forward.v, v);
    w.seal();
    w.run_forward();
    for (double& x : out) x *= 4;
    expect_near(read(w.forward.out), out, dtype == DType::kF16 ? 1e-6 : 0);  // f16 denormals round
  }
}

TEST_P(Property, WindowWiderThanTheSequenceIsFull) {
  for (const DType dtype : kDtypes) {
    for (const auto& [wide, narrow] : {std::pair{window(500, 500), full()},
                                       {window(500, 0), causal()},
                                       {window(INT64_MAX, INT64_MAX), full()},
                                       {window(INT64_MAX, 0), causal()},
                                       {chunked(130), full()},
                                       {chunked(INT64_MAX), full()},
                                       {chunked(INT64_MAX, causal()), causal()}}) {
      Workload a({.dtype = dtype, .sq = 100, .sk = 130, .mask = wide}, 5),
          b({.dtype = dtype, .sq = 100, .sk = 130, .mask = narrow}, 5);
      expect_same(a, b, dtype);
    }
  }
}

// With as many queries as keys both alignments are the same mask; else a top-left band is a
// bottom-right one that is shifted.
TEST_P(Property, TopLeftIsAShiftedBand) {
  struct Masks {
    int64_t sq, sk;
    Mask top_left, bottom_right;
  };
  for (const DType dtype : kDtypes) {
    for (const Masks& masks : {Masks{100, 100, causal(), causal()},
                               {100, 100, window(30, 7), window(30, 7)},
                               {100, 100, chunked(40), chunked(40)},
                               {130, 100, causal(), window(-1, 30)},
                               {130, 100, window(40, 5), window(10, 35)},
                               {100, 130, window(-1, 30), causal()}}) {
      const auto [sq, sk, first, last] = masks;
      Workload a({.dtype = dtype, .sq = sq, .sk = sk, .mask = top_left(first)}, 5),
          b({.dtype = dtype, .sq = sq, .sk = sk, .mask = last}, 5);
      expect_same(a, b, dtype);
    }
  }
}

TEST_P(Property, MultiHeadEqualsHeadsOneByOne) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 60, .sk = 80, .hq = 6, .hk = 2, .d = 40, .dv = 24}, 6);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) continue;
    auto head = [](Tensor t, int64_t h) {
      t.data = static_cast<std::byte*>(t.data) + h * t.strides[2] * size_of(t.dtype);
      t.shape[2] = 1;
      return t;
    };
    for (int64_t h = 0; h < 6; ++h) {
      Dense one(dtype, {1, 60, 1, 24});
      compute(ForwardTensors{.q = head(w.forward.q, h),
                             .k = head(w.forward.k, h / 3),
                             .v = head(w.forward.v, h / 3),
                             .out = one},
              w.options);
      expect_near(read(one), read(head(w.forward.out, h)), ulp(dtype));
    }
  }
}

// Inputs may be broadcast (stride 0) and reversed (negative strides).
TEST_P(Property, BroadcastAndReversedInputs) {
  const int64_t batch = 2, s = 70, d = 24;
  for (const DType dtype : kDtypes) {
    Workload w(
        {.dtype = dtype, .batch = batch, .sq = s, .sk = s, .hq = 4, .hk = 4, .d = d, .dv = d}, 7),
        copy(w.c, 7);
    w.options.engine = copy.options.engine = engine();
    Tensor k = rows(w.forward.k, s - 1, s);  // last row first, head 0 of batch 0 for all
    k.strides = {0, -k.strides[1], 0, 1};
    write(copy.forward.k, read(k));
    copy.seal();
    w.forward.k = w.backward.k = k;
    if (!computes([&] { w.run_forward(); })) continue;
    copy.run_forward();
    EXPECT_EQ(bits(w.forward.out), bits(copy.forward.out));
    if (!computes([&] { w.run_backward(); })) continue;
    copy.run_backward();
    expect_near(read(w.backward.dq), read(copy.backward.dq), ulp(dtype));
    expect_near(read(w.backward.dk), read(copy.backward.dk), ulp(dtype));
  }
}

TEST_P(Property, ReversedOutput) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 70, .sk = 40, .hq = 2, .hk = 2, .d = 24, .dv = 24}, 8);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) continue;
    Dense buffer(dtype, {1, 70, 2, 24});
    Tensor reversed = rows(buffer, 69, 70);
    reversed.strides[1] = -reversed.strides[1];
    compute(ForwardTensors{.q = w.forward.q, .k = w.forward.k, .v = w.forward.v, .out = reversed},
            w.options);
    EXPECT_EQ(read(reversed), read(w.forward.out));
  }
}

TEST_P(Property, LseIsOptional) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 33, .sk = 65, .mask = causal()}, 9);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) continue;
    const auto out = bits(w.forward.out);
    w.seal();
    w.forward.lse = {};
    w.run_forward();
    EXPECT_EQ(bits(w.forward.out), out);
  }
}

// A sink is one more key whose score is the sink and whose value is 0: another dimension for each
// head of a group, 1 in the queries of the head and its sink in that key, gives it.
TEST_P(Property, SinkIsAKeyWithoutValue) {
  const int64_t d = 16, dv = 24, hq = 4, hk = 2, group = 2;
  for (const DType dtype : kDtypes) {
    for (const auto& [sq, sk] : {std::pair{int64_t{70}, int64_t{130}}, {2, 3000}}) {
      Case c{.dtype = dtype, .batch = 2, .sq = sq, .sk = sk, .hq = hq, .hk = hk, .d = d, .dv = dv};
      c.dlse = c.sinks = true;
      SCOPED_TRACE(c.name());
      Workload w(c, 23);
      c.sinks = false;
      c.sk = sk + 1;
      c.d = d + group;
      Workload wide(c, 24);
      const std::vector<double> sinks = {2, -1, 5, 3};
      write(w.forward.sinks, sinks);
      for (Workload* one : {&w, &wide}) {
        one->options.engine = engine();
        one->options.scale = 0.5;
      }
      const auto q = read(w.forward.q), k = read(w.forward.k);
      std::vector<double> wide_q, wide_k;
      for (int64_t row = 0; row < 2 * sq * hq; ++row) {
        wide_q.insert(wide_q.end(), q.begin() + row * d, q.begin() + (row + 1) * d);
        for (int64_t g = 0; g < group; ++g) wide_q.push_back(row % group == g ? 1 : 0);
      }
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t row = b * sk * hk; row < (b + 1) * sk * hk; ++row) {
          wide_k.insert(wide_k.end(), k.begin() + row * d, k.begin() + (row + 1) * d);
          wide_k.resize(wide_k.size() + group);
        }
        for (int64_t h = 0; h < hq; ++h) {
          if (h % group == 0) wide_k.resize(wide_k.size() + d);
          wide_k.push_back(sinks[h] / 0.5);
        }
      }
      write(wide.forward.q, wide_q);
      write(wide.forward.k, wide_k);
      write(rows(wide.forward.v, 0, sk), read(w.forward.v));
      write(rows(wide.forward.v, sk, 1), std::vector<double>(2 * hk * dv));
      write(wide.backward.dout, read(w.backward.dout));
      write(wide.backward.dlse, read(w.backward.dlse));
      w.seal();
      wide.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      wide.run_forward();
      const double bound = dtype == DType::kF32 ? 1e-4 : 4 * ulp(dtype);
      expect_near(read(w.forward.out), read(wide.forward.out), bound);
      expect_near(read(w.forward.lse), read(wide.forward.lse), 1e-5);
      if (!computes([&] { w.run_backward(); })) continue;
      wide.run_backward();
      expect_near(read(w.backward.dv), read(rows(wide.backward.dv, 0, sk)), bound);
      const auto dk = read(rows(wide.backward.dk, sk, 1)), got = read(w.backward.dsinks);
      for (int64_t h = 0; h < hq; ++h) {
        double want = 0;
        for (int64_t b = 0; b < 2; ++b) {
          want += dk[(b * hk + h / group) * (d + group) + d + h % group] / 0.5;
        }
        EXPECT_NEAR(got[h], want, bound * (1 + std::fabs(want))) << "head " << h;
      }
    }
  }
}

// Attention over the keys in `ends.size()` parts, merged. The first has the sinks.
void split_and_merge(Workload& w, const std::vector<int64_t>& ends, DType part_dtype) {
  const int64_t sq = w.c.sq, hq = w.c.hq, dv = w.c.dv;
  std::deque<Dense> memory;
  std::vector<Merged> parts;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    const Tensor& part_out =
        memory.emplace_back(w.c.dtype, std::initializer_list<int64_t>{w.c.batch, sq, hq, dv});
    const Tensor& part_lse =
        memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{w.c.batch, hq, sq});
    compute(ForwardTensors{.q = w.forward.q,
                           .k = rows(w.forward.k, begin, end - begin),
                           .v = rows(w.forward.v, begin, end - begin),
                           .out = part_out,
                           .lse = part_lse,
                           .sinks = parts.empty() ? w.forward.sinks : Tensor()},
            w.options);
    const Tensor& other =
        memory.emplace_back(part_dtype, std::initializer_list<int64_t>{w.c.batch, sq, hq, dv});
    write(other, read(part_out));
    parts.push_back({other, part_lse});
    begin = end;
  }
  w.seal();
  compute(parts, {w.forward.out, w.forward.lse}, w.options.engine);
  EXPECT_TRUE(w.check_memory());
}

TEST_P(Property, MergeOfAnySplitIsTheWhole) {
  std::mt19937_64 random(10);
  for (const DType dtype : kDtypes) {
    for (int round = 0; round < 6; ++round) {
      Workload w({.dtype = dtype,
                  .batch = 2,
                  .sq = 9,
                  .sk = 100,
                  .hq = 4,
                  .hk = 2,
                  .layout = round % 2 ? Layout::kPadded : Layout::kBshd,
                  .sinks = round % 3 == 1},
                 round);
      w.options.engine = engine();
      if (!computes([&] { w.run_forward(); })) continue;
      const auto out = read(w.forward.out), lse = read(w.forward.lse);
      std::vector<int64_t> ends;  // empty parts (lse = -inf) among them
      for (int part = 0; part < 1 + round; ++part)
        ends.push_back(static_cast<int64_t>(random() % 101));
      ends.push_back(100);
      std::sort(ends.begin(), ends.end());
      split_and_merge(w, ends, round % 3 ? dtype : DType::kF32);
      expect_near(read(w.forward.out), out, 4 * ulp(dtype));
      expect_near(read(w.forward.lse), lse, 1e-5);
    }
  }
}

// The gradient of sum(dout o out) + sum(dlse o lse) through merge: with w_p = exp(LSE_p - LSE),
// that of out_p is w_p dout, and that of LSE_p is w_p (dlse + rowsum(dout o (out_p - out))).
TEST_P(Property, MergeOfHalvesHasTheGradientOfTheWhole) {
  for (const DType dtype : kDtypes) {
    const int64_t sq = 9, sk = 100, hq = 4, dv = 16, half = 37;
    Workload w(
        {.dtype = dtype, .sq = sq, .sk = sk, .hq = hq, .hk = 2, .d = 16, .dv = dv, .dlse = true},
        21);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) continue;
    if (!computes([&] { w.run_backward(); })) continue;
    const auto out = read(w.forward.out), lse = read(w.forward.lse), dout = read(w.backward.dout),
               dlse = read(w.backward.dlse);
    const auto dq = read(w.backward.dq), dk = read(w.backward.dk);
    std::vector<double> dq_sum(dq.size()), dk_parts;
    for (const auto& [begin, count] : {std::pair{int64_t{0}, half}, {half, sk - half}}) {
      const Tensor k = rows(w.forward.k, begin, count), v = rows(w.forward.v, begin, count);
      Dense part_out(dtype, {1, sq, hq, dv}), part_dout(dtype, {1, sq, hq, dv});
      Dense part_lse(DType::kF32, {1, hq, sq}), part_dlse(DType::kF32, {1, hq, sq});
      Dense part_dq(dtype, {1, sq, hq, 16}), part_dk(dtype, {1, count, 2, 16});
      Dense part_dv(dtype, {1, count, 2, dv});
      compute(ForwardTensors{w.forward.q, k, v, part_out, part_lse}, w.options);
      const auto o = read(part_out), l = read(part_lse);
      std::vector<double> given_dout(dout.size()), given_dlse(dlse.size());
      for (int64_t i = 0; i < sq; ++i) {
        for (int64_t h = 0; h < hq; ++h) {
          const int64_t row = h * sq + i;
          const double weight = std::exp(l[row] - lse[row]);
          double difference = dlse[row];
          for (int64_t c = (i * hq + h) * dv; c < (i * hq + h + 1) * dv; ++c) {
            given_dout[c] = weight * dout[c];
            difference += dout[c] * (o[c] - out[c]);
          }
          given_dlse[row] = weight * difference;
        }
      }
      write(part_dout, given_dout);
      write(part_dlse, given_dlse);
      BackwardTensors b{part_dout, w.forward.q, k,       v,      part_out,
                        part_lse,  part_dq,     part_dk, part_dv};
      b.dlse = part_dlse;
      compute(b, w.options);
      const auto part = read(part_dq), keys = read(part_dk);
      for (size_t n = 0; n < part.size(); ++n) dq_sum[n] += part[n];
      dk_parts.insert(dk_parts.end(), keys.begin(), keys.end());
    }
    expect_near(dq_sum, dq, 4 * ulp(dtype));
    expect_near(dk_parts, dk, 4 * ulp(dtype));
  }
}

// Many steps at the same keys: what a step leaves for others to fetch must stay until they have it.
TEST_P(Property, GradientsOfManyRowsFollowTheDefinition) {
  for (const Case& c :
       {Case{.dtype = DType::kF16, .sq = 700, .sk = 65, .hq = 2, .d = 32, .dv = 32, .softcap = 2},
        Case{.dtype = DType::kBF16, .sq = 700, .sk = 65, .hq = 2, .mask = causal()}}) {
    SCOPED_TRACE(c.name());
    Workload w(c, 7);
    w.options.engine = engine();
    if (!runs(w)) continue;
    EXPECT_TRUE(backward_is_right(w, expect(w)));
  }
}

// Central differences of the forward pass in double precision.
TEST_P(Property, GradientsAreThoseOfFiniteDifferences) {
  for (const bool sinks : {false, true}) {
    Workload w({.sq = 3,
                .sk = 5,
                .hq = 2,
                .hk = 1,
                .d = 4,
                .dv = 3,
                .mask = causal(),
                .dlse = true,
                .sinks = sinks},
               22);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) return;
    if (!computes([&] { w.run_backward(); })) return;
    Case wide = w.c;
    wide.dtype = DType::kF64;
    Workload exact(wide, 22);
    exact.options.engine = "reference";
    write(exact.forward.q, read(w.forward.q));
    write(exact.forward.k, read(w.forward.k));
    write(exact.forward.v, read(w.forward.v));
    const auto dout = read(w.backward.dout), dlse = read(w.backward.dlse);
    const auto loss = [&] {
      exact.seal();
      exact.run_forward();
      const auto out = read(exact.forward.out), lse = read(exact.forward.lse);
      return std::inner_product(out.begin(), out.end(), dout.begin(), 0.0) +
             std::inner_product(lse.begin(), lse.end(), dlse.begin(), 0.0);
    };
    struct {
      Tensor input, gradient;
      double step = 1e-5;
    } const checked[] = {{exact.forward.q, w.backward.dq},
                         {exact.forward.k, w.backward.dk},
                         {exact.forward.v, w.backward.dv},
                         {exact.forward.sinks, w.backward.dsinks, 0x1p-10}};  // of f32
    for (const auto& [input, gradient, step] : checked) {
      if (!input.given()) continue;
      auto x = read(input);
      std::vector<double> differences;
      for (double& value : x) {
        const double saved = value;
        double sides[2];
        for (const int side : {0, 1}) {
          value = saved + (side ? step : -step);
          write(input, x);
          sides[side] = loss();
        }
        value = saved;
        differences.push_back((sides[1] - sides[0]) / (2 * step));
      }
      write(input, x);
      expect_near(read(gradient), differences, 1e-5);
    }
  }
}

FULGUR_EVERY_ENGINE(Property);

}  // namespace
}  // namespace fulgur::test
