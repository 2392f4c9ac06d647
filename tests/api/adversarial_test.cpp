// Values that break careless kernels: huge, equal, tiny, infinite, NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kDtypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class Adversarial : public EveryEngine {
 protected:
  // GPUs multiply numbers of f32 as sums of two with 11 bits, which lose up to 3 units of the last
  // one.
  bool multiplies_parts(DType dtype) const { return engine() == "cuda" && dtype == DType::kF32; }
  // By what a value may be off that is multiplied by a weight of 1.
  double copy_error(DType dtype, double value) const {
    return multiplies_parts(dtype) ? 3 * 0x1p-23 * std::fabs(value) : 0;
  }

  // The case in every dtype, its inputs and options changed by `edit`, forward and backward.
  void follows_reference(Case c, const std::function<void(Workload&)>& edit) {
    for (const DType dtype : kDtypes) {
      c.dtype = dtype;
      SCOPED_TRACE(c.name() + " seed " + std::to_string(c.seed()));
      Workload w(c, c.seed());
      w.options.engine = engine();
      edit(w);
      w.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      const Expected e = expect(w);
      EXPECT_TRUE(forward_is_right(w, e));
      if (computes([&] { w.run_backward(); })) {
        EXPECT_TRUE(backward_is_right(w, e));
      }
      EXPECT_TRUE(w.check_memory());
    }
  }
};

// Sets elements of a tensor: value = f(row, head, dim), rows counted over the whole batch.
void fill(const Tensor& t, const std::function<double(int64_t, int64_t, int64_t)>& f) {
  const int64_t heads = t.shape[t.rank - 2], dim = t.shape[t.rank - 1];
  std::vector<double> values(static_cast<size_t>(t.numel()));
  for (size_t n = 0; n < values.size(); ++n) {
    const auto i = static_cast<int64_t>(n);
    values[n] = f(i / dim / heads, i / dim % heads, i % dim);
  }
  write(t, values);
}

// Changes some elements.
void edit(const Tensor& t, const std::function<void(std::vector<double>&)>& change) {
  std::vector<double> values = read(t);
  change(values);
  write(t, values);
}

TEST_P(Adversarial, LargeScores) {
  follows_reference({.sq = 130, .sk = 130, .hq = 2, .hk = 2, .mask = causal()}, [](Workload& w) {
    std::mt19937_64 random(1);
    randomize(w.forward.q, random, 8);
    randomize(w.forward.k, random, 8);
  });
}

TEST_P(Adversarial, LargeOffsetsOfScores) {
  // The first keys score far below the later ones and the other way round: the running maximum
  // moves by hundreds in either direction.
  for (const double sign : {1.0, -1.0}) {
    follows_reference({.sq = 70, .sk = 300, .d = 16, .dv = 16}, [sign](Workload& w) {
      fill(w.forward.q, [](int64_t, int64_t, int64_t c) { return c == 0 ? 4 : 0.25; });
      edit(w.forward.k, [sign](std::vector<double>& k) {
        for (size_t j = 0; j < 300; ++j) k[j * 16] = sign * static_cast<double>(j);
      });
    });
  }
}

// Scores that rise over the walk along the keys, again and again and by different amounts: a row's
// running maximum moves by up to 30 binary orders at once while O holds what came before, in other
// tiles than those where its neighbours' does, and rows that rise by little keep part of their O.
void rising_scores(Workload& w, bool to_the_left) {
  const int64_t sk = w.c.sk, d = w.c.d;
  std::mt19937_64 random(2);
  randomize(w.forward.q, random, 0.25);
  randomize(w.forward.k, random, 0.25);
  w.options.scale = 1;
  edit(w.forward.q, [d](std::vector<double>& q) {
    constexpr double kSteps[] = {20, 0.5, 0, 10, -20, 2, 5, 1};
    for (size_t i = 0; i < q.size() / static_cast<size_t>(d); ++i) {
      const double step = kSteps[i % 8];
      q[i * static_cast<size_t>(d)] = i % 3 == 0 ? 0 : step;
      q[i * static_cast<size_t>(d) + 1] = i % 3 == 0 ? step : 0;
    }
  });
  edit(w.forward.k, [=](std::vector<double>& k) {
    for (int64_t j = 0; j < sk; ++j) {
      const int64_t walked = to_the_left ? sk - 1 - j : j;
      k[static_cast<size_t>(j * d)] = static_cast<double>(walked / 50);
      k[static_cast<size_t>(j * d) + 1] = static_cast<double>((walked + 70) / 140);
    }
  });
}

TEST_P(Adversarial, RisingScores) {
  for (Case c : {Case{.sq = 130, .sk = 700}, Case{.sq = 130, .sk = 700, .mask = causal()},
                 Case{.sq = 3, .sk = 2000, .d = 128, .dv = 128},
                 Case{.sq = 16, .sk = 700, .hq = 8, .mask = causal()}}) {
    for (const DType dtype : kDtypes) {
      c.dtype = dtype;
      SCOPED_TRACE(c.name());
      // Values near the end of the range: what O holds before it is rescaled is in range, too.
      for (const double size : {1.0, dtype == DType::kF16 ? 1e4 : 1e30}) {
        for (const bool to_the_left : {true, false}) {
          Workload w(c, 1);
          w.options.engine = engine();
          rising_scores(w, to_the_left);
          std::mt19937_64 random(3);
          randomize(w.forward.v, random, size);
          const Expected e = expect_forward(w);
          for (const bool invariant : {true, false}) {  // else keys may be shared out
            w.options.invariant = invariant;
            w.seal();
            if (!computes([&] { w.run_forward(); })) continue;
            EXPECT_TRUE(forward_is_close(w, e))
                << "values of " << size << (to_the_left ? ", rising to the left" : "");
          }
        }
      }
    }
  }
}

// 1e-40 is a denormal number in f32.
TEST_P(Adversarial, ScalesOfEverySignAndSize) {
  const Case c{.sq = 70, .sk = 333, .hq = 2, .hk = 1};
  for (const double scale : {-0.3, 0.0, 1e-40, -1e-40, 1e-20}) {
    for (const Mask& mask : {full(), causal()}) {
      SCOPED_TRACE(scale);
      Case masked = c;
      masked.mask = mask;
      follows_reference(masked, [scale](Workload& w) { w.options.scale = scale; });
    }
  }
  // Large and small ones that inputs make up for.
  for (const bool large : {true, false}) {
    SCOPED_TRACE(large ? "large" : "small");
    follows_reference(c, [large](Workload& w) {
      const bool f16 = w.c.dtype == DType::kF16;
      const double size = f16 ? (large ? 0x1p-10 : 0x1p10) : (large ? 0x1p-50 : 0x1p50);
      std::mt19937_64 random(4);
      randomize(w.forward.q, random, size);
      randomize(w.forward.k, random, size);
      w.options.scale = 0.125 / (size * size);
    });
  }
}

// One key takes all, whatever the others score.
TEST_P(Adversarial, HugeScale) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 70, .sk = 333}, 6);
    w.options.engine = engine();
    w.options.scale = 1e36;
    if (!computes([&] { w.run_forward(); })) continue;
    const auto e = expect_forward(w);
    EXPECT_TRUE(
        within("out", w.forward.out, e.reference.out, {}, 0, copy_error(dtype, e.unit.out)));
    EXPECT_TRUE(within("lse", w.forward.lse, e.reference.lse, {}, 0, 1e-6 * e.unit.lse));
  }
}

// A large cap is none; under a small one only signs are left.
TEST_P(Adversarial, SoftcapsOfEverySize) {
  for (const double softcap : {1e4, 1e-4}) {
    for (const Mask& mask : {full(), causal()}) {
      SCOPED_TRACE(softcap);
      follows_reference({.sq = 70, .sk = 333, .hq = 2, .hk = 1, .mask = mask, .softcap = softcap},
                        [](Workload&) {});
    }
  }
}

TEST_P(Adversarial, AllEqual) {
  follows_reference({.sq = 65, .sk = 127, .d = 17, .dv = 17}, [](Workload& w) {
    fill(w.forward.q, [](int64_t, int64_t, int64_t) { return 1; });
    fill(w.forward.k, [](int64_t, int64_t, int64_t) { return 1; });
    fill(w.forward.v, [](int64_t, int64_t, int64_t) { return 3; });
  });
}

TEST_P(Adversarial, ZeroInputs) {
  follows_reference({.sq = 33, .sk = 70}, [](Workload& w) {
    for (const Tensor& t : {w.forward.q, w.forward.k, w.forward.v, w.backward.dout}) {
      fill(t, [](int64_t, int64_t, int64_t) { return 0; });
    }
  });
}

TEST_P(Adversarial, OneHotRowsCopyTheirValue) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 64, .sk = 64, .d = 64, .dv = 64}, 1);
    w.options.engine = engine();
    auto target = [](int64_t i) { return (i * 37 + 5) % 64; };
    fill(w.forward.q, [&](int64_t i, int64_t, int64_t c) { return c == target(i) ? 60 : 0; });
    fill(w.forward.k, [](int64_t j, int64_t, int64_t c) { return c == j ? 60 : 0; });
    w.seal();
    if (!computes([&] { w.run_forward(); })) continue;
    const auto out = read(w.forward.out), v = read(w.forward.v), lse = read(w.forward.lse);
    for (int64_t i = 0; i < 64; ++i) {
      for (int64_t c = 0; c < 64; ++c) {
        const double want = v[target(i) * 64 + c];
        ASSERT_NEAR(out[i * 64 + c], want, copy_error(dtype, want));
      }
      ASSERT_NEAR(lse[i], 450, 1e-3);  // 60 * 60 / sqrt(64)
    }
  }
}

TEST_P(Adversarial, RowsWithoutKeysAreExactlyZero) {
  struct {
    int64_t sq, sk;
    Mask mask;
  } const cases[] = {
      {130, 60, causal()}, {130, 60, window(3, 2)}, {70, 0, full()}, {65, 1, window(0, 0)}};
  for (const DType dtype : kDtypes) {
    for (const auto& [sq, sk, mask] : cases) {
      Workload w({.dtype = dtype, .batch = 2, .sq = sq, .sk = sk, .hq = 2, .hk = 1, .mask = mask},
                 3);
      w.options.engine = engine();
      if (!computes([&] { w.run_forward(); })) continue;
      const bool backward = computes([&] { w.run_backward(); });
      const auto out = read(w.forward.out), lse = read(w.forward.lse), dq = read(w.backward.dq);
      for (int64_t row = 0; row < 2 * sq; ++row) {
        const int64_t i = row % sq, diagonal = i + sk - sq;
        if (sk > 0 && (mask == full() || diagonal + mask.right >= 0)) continue;
        for (int64_t h = 0; h < 2; ++h) {
          EXPECT_EQ(lse[w.lse_index(row / sq, h, i)], -kInf);
          for (int64_t c = 0; c < 64; ++c) {
            ASSERT_EQ(out[(row * 2 + h) * 64 + c], 0) << "row " << row << " of " << sq;
            if (!backward) continue;
            ASSERT_EQ(dq[(row * 2 + h) * 64 + c], 0) << "row " << row << " of " << sq;
          }
        }
      }
    }
  }
}

// What out, lse and their gradients hold in rows that do not exist is not data, as in q: neither
// after used queries, nor after the last packed sequence.
TEST_P(Adversarial, PoisonInRowsThatDoNotExist) {
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    for (const DType dtype : kDtypes) {
      Workload w({.dtype = dtype,
                  .batch = 3,
                  .sq = 130,
                  .sk = 90,
                  .hq = 4,
                  .hk = 2,
                  .mask = causal(),
                  .layout = layout,
                  .seqused_q = true,
                  .dlse = true,
                  .sinks = true},
                 3);
      w.options.engine = engine();
      if (!computes([&] { w.run_forward(); })) continue;
      const Expected e = expect(w);
      EXPECT_TRUE(forward_is_right(w, e));
      const std::vector<double> out = read(w.forward.out), lse = read(w.forward.lse);
      std::vector<double> poisoned_out(out.size(), kNan), poisoned_lse(lse.size(), kNan);
      for (size_t b = 0; b < w.sequences.size(); ++b) {
        const Rows& s = w.sequences[b];
        const int64_t row = 4 * 64;  // elements of out
        std::copy_n(out.begin() + s.q_begin * row, s.sq * row,
                    poisoned_out.begin() + s.q_begin * row);
        for (int64_t h = 0; h < 4; ++h) {
          const int64_t at = w.lse_index(b, h, 0);
          std::copy_n(lse.begin() + at, s.sq, poisoned_lse.begin() + at);
        }
      }
      write(w.forward.out, poisoned_out);
      write(w.forward.lse, poisoned_lse);
      if (!computes([&] { w.run_backward(); })) continue;
      write(w.forward.out, out);
      write(w.forward.lse, lse);
      EXPECT_TRUE(backward_is_right(w, e));
    }
  }
}

// Sinks of every size and no size, each with a common one and one that is none. The first rows
// see no key.
TEST_P(Adversarial, SinksOfEverySize) {
  const Case cases[] = {
      {.batch = 2, .sq = 70, .sk = 40, .hq = 4, .hk = 2, .mask = causal(), .dlse = true},
      {.batch = 2, .sq = 3, .sk = 300, .hq = 4, .hk = 2, .mask = causal(), .dlse = true},
      {.batch = 2, .sq = 3, .sk = 0, .hq = 4, .hk = 2, .dlse = true},
      {.batch = 2, .sq = 70, .sk = 0, .hq = 4, .hk = 2, .dlse = true}};
  for (Case c : cases) {
    c.sinks = true;
    for (const double sink : {kInf, -kInf, kNan, 3.4e38, -3.4e38, 1e30, -1e30, 100.0, -100.0}) {
      SCOPED_TRACE(sink);
      follows_reference(c, [&](Workload& w) {
        write(w.forward.sinks, std::vector{sink, 0.5, -kInf, 0.0});
        if (sink != -kInf) return;
        edit(w.backward.dlse, [&](std::vector<double>& dlse) {  // of rows whose LSE is -inf
          for (size_t b = 0; b < 2; ++b) {
            for (int64_t i = 0; i < c.sq - c.sk; ++i) dlse[w.lse_index(b, 0, i)] = kNan;
          }
        });
      });
    }
  }
}

// With sinks of -inf a call is as without them, bit for bit.
TEST_P(Adversarial, SinksOfMinusInfinityAreNone) {
  for (const DType dtype : kDtypes) {
    for (const int64_t sq : {70, 3}) {
      Case c{.dtype = dtype, .sq = sq, .sk = 60, .hq = 2, .hk = 1, .mask = causal(), .dlse = true};
      Workload without(c, 12);
      c.sinks = true;
      Workload with(c, 12);
      without.options.engine = with.options.engine = engine();
      without.options.deterministic = with.options.deterministic = true;
      write(with.forward.sinks, std::vector{-kInf, -kInf});
      write(with.backward.dlse, read(without.backward.dlse));
      with.seal();
      if (!runs(with) || !runs(without)) continue;
      EXPECT_EQ(bits(with.forward.out), bits(without.forward.out));
      EXPECT_EQ(bits(with.forward.lse), bits(without.forward.lse));
      EXPECT_EQ(bits(with.backward.dq), bits(without.backward.dq));
      EXPECT_EQ(bits(with.backward.dk), bits(without.backward.dk));
      EXPECT_EQ(bits(with.backward.dv), bits(without.backward.dv));
      for (const double x : read(with.backward.dsinks)) EXPECT_EQ(x, 0);
    }
  }
}

TEST_P(Adversarial, Denormals) {
  follows_reference({.sq = 40, .sk = 70, .d = 16, .dv = 16}, [this](Workload& w) {
    // Their bits below 2^-136 are lost.
    const double tiny = w.c.dtype == DType::kF16      ? 1e-6
                        : multiplies_parts(w.c.dtype) ? 0x1p-113
                                                      : 1e-39;
    std::mt19937_64 random(5);
    randomize(w.forward.k, random, tiny);
    randomize(w.forward.v, random, tiny);
  });
}

TEST_P(Adversarial, LargestFiniteValues) {
  // The sum of P V stays in range although V is at the end of it.
  for (const DType dtype : kDtypes) {
    const double largest = rounded(dtype == DType::kF16 ? 65504 : 3.3e38, dtype);
    Workload w({.dtype = dtype, .sq = 20, .sk = 1, .d = 8, .dv = 8}, 1);
    w.options.engine = engine();
    fill(w.forward.v, [&](int64_t, int64_t, int64_t) { return largest; });
    w.seal();
    if (!computes([&] { w.run_forward(); })) continue;
    for (const double x : read(w.forward.out)) ASSERT_NEAR(x, largest, copy_error(dtype, largest));
  }
}

// Keys whose K and V are NaN or infinite, at tile edges and inside tiles. Rows that do not see them
// must be right; rows that do see a NaN must show it: the reference decides which.
TEST_P(Adversarial, PoisonInMaskedKeys) {
  struct {
    int64_t sq, sk;
    Mask mask;
  } const cases[] = {{100, 100, causal()},
                     {100, 100, window(5, 0)},
                     {130, 200, window(20, 20)},
                     {3, 300, causal()},
                     {200, 70, causal()},
                     {100, 100, window(-1, 3)},
                     {70, 300, window(2, 1)},
                     {100, 100, window(7, -1)},
                     {1, 300, window(40, 0)},
                     {100, 100, chunked(40)},
                     {130, 200, chunked(64, causal())},
                     {3, 300, chunked(151)}};
  for (const auto& [sq, sk, mask] : cases) {
    for (const int64_t key : {sk - 1, sk / 2, int64_t{64}, int64_t{0}}) {
      SCOPED_TRACE("key " + std::to_string(key));
      for (const double dropout : {0.0, 0.25}) {
        const Case c{.sq = sq, .sk = sk, .d = 24, .dv = 24, .mask = mask, .dropout = dropout};
        follows_reference(c, [key](Workload& w) {
          for (const Tensor& t : {w.forward.k, w.forward.v}) {
            edit(t, [key](std::vector<double>& x) {
              for (int64_t c = 0; c < 24; ++c) x[key * 24 + c] = kNan;
            });
          }
        });
      }
    }
  }
}

// The key is one of 16 of which queries see the first ten: its gradients are 0.
TEST_P(Adversarial, PoisonInAKeyThatNoQuerySees) {
  for (const int64_t dim : {24, 128, 256}) {
    for (const bool in_k : {true, false}) {
      SCOPED_TRACE(in_k ? "k" : "v");
      const Case c{.sq = 42, .sk = 48, .d = dim, .dv = dim, .mask = top_left(causal())};
      follows_reference(c, [&](Workload& w) {
        edit(in_k ? w.forward.k : w.forward.v, [&](std::vector<double>& x) {
          for (int64_t i = 0; i < dim; ++i) x[43 * dim + i] = kNan;
        });
      });
    }
  }
}

// Wide heads, whose rows several warps of a GPU share: out and gradients of the rows that see the
// key, and of no others.
TEST_P(Adversarial, PoisonInMaskedKeysOfWideHeads) {
  const DType bf16 = DType::kBF16, f16 = DType::kF16;
  for (const Case& c :
       {Case{.dtype = bf16, .sq = 70, .sk = 90, .d = 512, .dv = 512, .mask = causal()},
        Case{.dtype = f16, .sq = 35, .sk = 150, .d = 300, .dv = 280, .mask = window(30, 2)},
        Case{.dtype = bf16, .sq = 4, .sk = 200, .hq = 4, .d = 576, .dv = 512, .mask = causal()}}) {
    for (const int64_t key : {c.sk - 1, c.sk / 2}) {
      for (const double poison : {kNan, kInf}) {
        SCOPED_TRACE(testing::Message() << c.name() << ", key " << key << ", " << poison);
        Workload w(c, 7);
        w.options.engine = engine();
        edit(w.forward.v, [&](std::vector<double>& v) { v[key * c.dv + 200] = poison; });
        w.seal();
        if (!computes([&] { w.run_forward(); })) continue;
        const Expected e = expect(w);
        EXPECT_TRUE(forward_is_right(w, e));
        w.run_backward();
        EXPECT_TRUE(backward_is_right(w, e));
      }
    }
  }
}

// Queries whose q and dout are NaN: those in front of the first key, which no gradient shows, and
// some that see all keys, whose gradients show it, but not the rows after the last key.
TEST_P(Adversarial, PoisonInQueriesReachesNoOtherRows) {
  for (const int64_t dim : {24, 128, 192}) {
    const Case full{.batch = 4, .sq = 40, .sk = 45, .d = dim, .dv = dim, .seqused = true};
    follows_reference(full, [&](Workload& w) {
      for (const Tensor& t : {w.forward.q, w.backward.dout})
        edit(t, [&](std::vector<double>& x) { x[3 * dim] = x[(40 + 7) * dim] = kNan; });
    });
    const Case c{
        .batch = 4, .sq = 40, .sk = 45, .d = dim, .dv = dim, .mask = causal(), .seqused = true};
    follows_reference(c, [&](Workload& w) {
      for (size_t b = 0; b < w.sequences.size(); ++b) {
        const Rows& s = w.sequences[b];
        const int64_t first = static_cast<int64_t>(b) * c.sq * dim;
        for (const Tensor& t : {w.forward.q, w.backward.dout}) {
          edit(t, [&](std::vector<double>& x) {
            for (int64_t i = 0; i < (s.sq - s.sk) * dim; ++i) x[first + i] = kNan;
          });
        }
      }
    });
  }
}

TEST_P(Adversarial, InfinityInMaskedKeys) {
  for (const DType dtype : kDtypes) {
    Case c{.dtype = dtype, .sq = 90, .sk = 90, .d = 24, .dv = 24, .mask = causal()};
    const auto last = 89 * 24;  // only the last row sees it
    Workload clean(c, 9), dirty(c, 9);
    for (Workload* w : {&clean, &dirty}) w->options.engine = engine();
    for (const Tensor& t : {dirty.forward.k, dirty.forward.v}) {
      edit(t, [&](std::vector<double>& x) {
        for (int64_t n = 0; n < 24; ++n) x[last + n] = n % 2 ? kInf : -kInf;
      });
    }
    dirty.seal();
    if (!computes([&] { clean.run_forward(); })) continue;
    dirty.run_forward();
    const bool backward = computes([&] { clean.run_backward(); });
    if (backward) dirty.run_backward();
    const auto out = read(clean.forward.out), got = read(dirty.forward.out);
    const auto dq = read(clean.backward.dq), got_dq = read(dirty.backward.dq);
    for (int64_t n = 0; n < last; ++n) {
      // Other sums may be taken where a tile holds infinities: one more rounding either way.
      const double ulp = dtype == DType::kF32 ? 0x1p-20 : dtype == DType::kF16 ? 0x1p-10 : 0x1p-7;
      ASSERT_NEAR(got[n], out[n], ulp * std::max(1.0, std::fabs(out[n]))) << "out, element " << n;
      if (!backward) continue;
      ASSERT_NEAR(got_dq[n], dq[n], ulp * std::max(1.0, std::fabs(dq[n]))) << "dq, element " << n;
    }
  }
}

TEST_P(Adversarial, NanInVisibleKeyReachesOutput) {
  for (const DType dtype : kDtypes) {
    for (const bool in_k : {true, false}) {
      Workload w({.dtype = dtype, .sq = 40, .sk = 150, .d = 16, .dv = 16}, 2);
      w.options.engine = engine();
      edit(in_k ? w.forward.k : w.forward.v, [](std::vector<double>& x) { x[77 * 16 + 3] = kNan; });
      w.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      const auto out = read(w.forward.out), lse = read(w.forward.lse);
      for (int64_t i = 0; i < 40; ++i) {
        EXPECT_EQ(std::isnan(lse[i]), in_k);
        for (int64_t c = 0; c < 16; ++c) ASSERT_EQ(std::isnan(out[i * 16 + c]), in_k || c == 3);
      }
    }
  }
}

TEST_P(Adversarial, NanInAQueryStaysInItsRow) {
  for (const DType dtype : kDtypes) {
    Workload w({.dtype = dtype, .sq = 40, .sk = 50, .d = 16, .dv = 16}, 2);
    w.options.engine = engine();
    edit(w.forward.q, [](std::vector<double>& x) { x[17 * 16 + 3] = kNan; });
    w.seal();
    if (!computes([&] { w.run_forward(); })) continue;
    const auto out = read(w.forward.out);
    for (int64_t n = 0; n < 40 * 16; ++n) ASSERT_EQ(std::isnan(out[n]), n / 16 == 17);
  }
}

// NaN in one row of Q or dO reaches dQ of that row, and dK and dV of the keys that it sees, as the
// reference has it: not those of other rows of a tile.
TEST_P(Adversarial, NanInARowReachesTheKeysThatItSees) {
  for (const Case& c :
       {Case{.sq = 150, .sk = 150, .hq = 2, .mask = causal()},
        Case{.sq = 130, .sk = 200, .hq = 2, .mask = window(20, 5), .dropout = 0.25},
        Case{.sq = 140, .sk = 150, .hq = 2, .d = 128, .dv = 128, .mask = chunked(40)},
        Case{.sq = 70, .sk = 90, .d = 256, .dv = 256, .mask = causal()},
        Case{.sq = 70, .sk = 90, .hq = 4, .hk = 2}}) {
    for (const int64_t row : {int64_t{0}, c.sq / 2, c.sq - 1}) {
      for (const bool in_q : {true, false}) {
        SCOPED_TRACE(testing::Message() << (in_q ? "q" : "dout") << ", row " << row);
        follows_reference(c, [&](Workload& w) {
          edit(in_q ? w.forward.q : w.backward.dout,
               [&](std::vector<double>& x) { x[row * c.hq * (in_q ? c.d : c.dv) + 3] = kNan; });
        });
      }
    }
  }
}

// Scores of -inf that no mask made: such keys weigh nothing; a row of them is a row without keys.
TEST_P(Adversarial, ScoresOfMinusInfinity) {
  for (const DType dtype : kDtypes) {
    for (const int64_t dead : {1, 64, 100, 149, 150}) {
      Case c{.dtype = dtype, .sq = 20, .sk = 150, .d = 8, .dv = 8};
      Workload w(c, 4);
      w.options.engine = engine();
      fill(w.forward.q,
           [](int64_t i, int64_t, int64_t) { return 0.1 * static_cast<double>(i + 1); });
      edit(w.forward.k, [&](std::vector<double>& k) { std::fill_n(k.begin(), dead * 8, -kInf); });
      w.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w))) << dead << " keys of -inf";
      for (const double x : read(w.forward.out)) ASSERT_FALSE(std::isnan(x));
      if (dead == 150) {
        for (const double x : read(w.forward.lse)) ASSERT_EQ(x, -kInf);
      }
    }
  }
}

class InfiniteScores : public Adversarial {
 protected:
  static constexpr int64_t kRows = 90, kDim = 24, kKey = 60, kColumn = 3;

  // A workload whose queries are positive in a column where one key is `value`, after both passes;
  // none where the engine does not compute it.
  std::unique_ptr<Workload> computed(DType dtype, const Mask& mask, double value) {
    const Case c{.dtype = dtype, .sq = kRows, .sk = kRows, .d = kDim, .dv = kDim, .mask = mask};
    auto w = std::make_unique<Workload>(c, 11);
    w->options.engine = engine();
    edit(w->forward.q, [](std::vector<double>& q) {
      for (int64_t i = 0; i < kRows; ++i) q[i * kDim + kColumn] = 1;
    });
    edit(w->forward.k, [=](std::vector<double>& k) { k[kKey * kDim + kColumn] = value; });
    w->seal();
    return runs(*w) ? std::move(w) : nullptr;
  }

  // Elements of `got` are NaN where nan(row, column) says so, and elsewhere near those of `want`.
  static void expect_near(const char* name, const Tensor& got, const Tensor& want,
                          const std::function<bool(int64_t, int64_t)>& nan) {
    // Other sums may be taken where a tile holds infinities: one more rounding either way.
    const double ulp = want.dtype == DType::kF32   ? 0x1p-20
                       : want.dtype == DType::kF16 ? 0x1p-10
                                                   : 0x1p-7;
    const auto x = read(got), y = read(want);
    const auto columns = static_cast<int64_t>(x.size()) / kRows;
    for (int64_t n = 0; n < static_cast<int64_t>(x.size()); ++n) {
      const int64_t row = n / columns, column = n % columns;
      if (nan(row, column)) {
        ASSERT_TRUE(std::isnan(x[n])) << name << ", row " << row << ", column " << column;
      } else {
        ASSERT_NEAR(x[n], y[n], ulp * std::max(1.0, std::fabs(y[n])))
            << name << ", row " << row << ", column " << column;
      }
    }
  }

  static bool sees(const Mask& mask, int64_t row, int64_t key) {
    return (mask.left < 0 || key >= row - mask.left) && (mask.right < 0 || key <= row + mask.right);
  }
};

const Mask kMasksOfInfiniteScores[] = {full(), causal(), window(5, 3)};

// The key weighs nothing, and nothing shows it but dQ, a sum of 0 times K. The reference leaves
// out what weighs nothing.
TEST_P(InfiniteScores, OfMinusInfinityReachOneColumnOfDq) {
  for (const DType dtype : kDtypes) {
    for (const Mask& mask : kMasksOfInfiniteScores) {
      const auto clean = computed(dtype, mask, -6e4), dirty = computed(dtype, mask, -kInf);
      if (clean == nullptr || dirty == nullptr) continue;
      const auto nowhere = [](int64_t, int64_t) { return false; };
      const auto reached = [&](int64_t row, int64_t column) {
        return engine() == "cpu" && column == kColumn && sees(mask, row, kKey);
      };
      expect_near("out", dirty->forward.out, clean->forward.out, nowhere);
      expect_near("lse", dirty->forward.lse, clean->forward.lse, nowhere);
      expect_near("dq", dirty->backward.dq, clean->backward.dq, reached);
      expect_near("dk", dirty->backward.dk, clean->backward.dk, nowhere);
      expect_near("dv", dirty->backward.dv, clean->backward.dv, nowhere);
    }
  }
}

// There is no weight, and all that the row has a part in shows it; nothing else does.
TEST_P(InfiniteScores, OfPlusInfinityReachTheRowAndItsKeys) {
  for (const DType dtype : kDtypes) {
    for (const Mask& mask : kMasksOfInfiniteScores) {
      const auto clean = computed(dtype, mask, 0), dirty = computed(dtype, mask, kInf);
      if (clean == nullptr || dirty == nullptr) continue;
      const auto row = [&](int64_t i, int64_t) { return sees(mask, i, kKey); };
      const auto key = [&](int64_t j, int64_t) {
        for (int64_t i = 0; i < kRows; ++i) {
          if (sees(mask, i, kKey) && sees(mask, i, j)) return true;
        }
        return false;
      };
      expect_near("out", dirty->forward.out, clean->forward.out, row);
      expect_near("lse", dirty->forward.lse, clean->forward.lse, row);
      expect_near("dq", dirty->backward.dq, clean->backward.dq, row);
      expect_near("dk", dirty->backward.dk, clean->backward.dk, key);
      expect_near("dv", dirty->backward.dv, clean->backward.dv, key);
    }
  }
}

// Scales that f32 holds as 0, as a denormal number or near its end, of scores that stay in range.
TEST_P(Adversarial, ScalesOfAnySize) {
  const Case c{.sq = 40, .sk = 130, .hq = 2, .d = 24, .dv = 24, .mask = causal()};
  for (const double scale : {0.0, 1e-40, -1e-40, 1e-46, 1e-300, -0.3}) {
    SCOPED_TRACE(scale);
    follows_reference(c, [&](Workload& w) { w.options.scale = scale; });
  }
  for (const double softcap : {0.0, 2.0}) {
    for (const int64_t sq : {40, 3}) {
      Case large = c;
      large.sq = sq;
      follows_reference(large, [&](Workload& w) {
        const bool f16 = w.c.dtype == DType::kF16;
        std::mt19937_64 random(6);
        randomize(w.forward.q, random, f16 ? 1e-3 : 1e-19);
        randomize(w.forward.k, random, f16 ? 1e-3 : 1e-19);
        w.options.scale = f16 ? 2e5 : 2e37;
        w.options.softcap = softcap;
      });
    }
  }
}

// A score of -inf is one whatever it is scaled by.
TEST_P(Adversarial, SmallScaleOfInfiniteKeys) {
  for (const DType dtype : kDtypes) {
    for (const int64_t sq : {20, 3}) {
      Workload w({.dtype = dtype, .sq = sq, .sk = 150, .d = 8, .dv = 8}, 4);
      w.options.engine = engine();
      w.options.scale = 1e-40;
      fill(w.forward.q, [](int64_t, int64_t, int64_t) { return 1; });
      edit(w.forward.k, [](std::vector<double>& k) { std::fill_n(k.begin(), 77 * 8, -kInf); });
      w.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
    }
  }
}

// A cap far above all scores is none.
TEST_P(Adversarial, LargeSoftcaps) {
  for (const DType dtype : kDtypes) {
    for (const int64_t sq : {40, 3}) {
      for (const double softcap : {1e6, 1e20, 1e30, 1e37, 1e38, 3e38, 1e39, 1e300}) {
        SCOPED_TRACE(softcap);
        Workload w({.dtype = dtype, .sq = sq, .sk = 130, .hq = 2, .mask = causal()}, 5);
        w.options.engine = engine();
        w.options.softcap = softcap;
        if (!computes([&] { w.run_forward(); })) continue;
        const bool backward = computes([&] { w.run_backward(); });
        w.options.softcap = 0;
        const Expected e = expect(w);
        EXPECT_TRUE(forward_is_right(w, e));
        EXPECT_TRUE(!backward || backward_is_right(w, e));
      }
    }
  }
}

// A cap far below all scores leaves their signs; one among tiny scores bends them.
TEST_P(Adversarial, SmallSoftcaps) {
  for (const int64_t sq : {40, 3}) {
    const Case c{.sq = sq, .sk = 130, .hq = 2, .d = 24, .dv = 24, .mask = causal()};
    for (const double softcap : {1e-6, 1e-30, 1e-37, 1e-38, 1e-40, 1e-44}) {
      for (const double scale : {0.2, 1e30}) {
        SCOPED_TRACE(std::to_string(std::log10(softcap)) + ", " + std::to_string(scale));
        follows_reference(c, [&](Workload& w) {
          w.options.softcap = softcap;
          w.options.scale = scale;
        });
      }
    }
    follows_reference(c, [&](Workload& w) {
      const double size = w.c.dtype == DType::kF16 ? 1e-3 : 1e-15;
      std::mt19937_64 random(7);
      randomize(w.forward.q, random, size);
      randomize(w.forward.k, random, size);
      w.options.softcap = size * size;
    });
    Workload w(c, 5);
    w.options.engine = engine();
    w.options.softcap = 1e-300;
    if (!computes([&] { w.run(); })) continue;
    w.options.softcap = 1e-44;  // 1e-300 is no cap to the naive computation in f32
    const Expected e = expect(w);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// The LSE of huge scores is rounded by more than they differ; P must not be above 1 for that.
TEST(CpuNumbers, ProbabilitiesOfHugeScores) {
  for (const double size : {1e3, 1e4, 1e6, 1e15}) {
    Workload w({.sq = 50, .sk = 130, .hq = 2, .d = 24, .dv = 24}, 8);
    w.options.engine = "cpu";
    std::mt19937_64 random(8);
    randomize(w.forward.q, random, size);
    randomize(w.forward.k, random, size);
    w.seal();
    w.run();
    const auto dout = read(w.backward.dout), dv = read(w.backward.dv);
    std::vector<double> most(24);  // of dV = P^T dO in each dimension
    for (size_t n = 0; n < dout.size(); ++n) most[n % 24] += std::fabs(dout[n]);
    for (size_t n = 0; n < dv.size(); ++n) {
      ASSERT_LE(std::fabs(dv[n]), 1.0001 * most[n % 24]) << "scores of " << size * size;
    }
  }
}

FULGUR_EVERY_ENGINE(Adversarial);
// What -inf does to dQ, the contract leaves to an engine.
FULGUR_CPU_MEMORY_ENGINES(InfiniteScores);

}  // namespace
}  // namespace fulgur::test
