// Dense biases: every option with every way to broadcast, what hidden keys hold, and what is no
// number.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cached.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"
#include "rejected.h"

namespace fulgur::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class DenseBias : public EveryEngine {
 protected:
  bool on_cuda() const { return engine() == "cuda"; }
  /// On GPUs one of 16 bits, for which there are more kernels than for f32.
  DType usual() const { return on_cuda() ? DType::kBF16 : DType::kF32; }
  /// One of each kind of kernels.
  static constexpr DType kDtypes[] = {DType::kF32, DType::kBF16};
};

// Values of each factor that do not go in step with those of another.
std::vector<Case> cases() {
  constexpr Bias kBiases[] = {Bias::kAll,    Bias::kHeads,   Bias::kTransposed, Bias::kKeys,
                              Bias::kPairs,  Bias::kBatches, Bias::kShared,     Bias::kColumns,
                              Bias::kShared, Bias::kRows,    Bias::kOne};
  constexpr DType kDtypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  constexpr Layout kLayouts[] = {Layout::kBshd, Layout::kPacked,       Layout::kPadded,
                                 Layout::kBhsd, Layout::kPackedPadded, Layout::kQkv};
  const Mask masks[] = {full(),      causal(),          full(), window(20, 3), window(-1, 7),
                        chunked(24), top_left(causal())};
  constexpr std::pair<int64_t, int64_t> kLengths[] = {{1, 90},  {3, 64},   {70, 65}, {130, 130},
                                                      {64, 63}, {200, 40}, {5, 0},   {33, 257}};
  constexpr std::pair<int64_t, int64_t> kHeads[] = {{4, 1}, {2, 2}, {6, 2}};
  constexpr std::pair<int64_t, int64_t> kDims[] = {{64, 64}, {17, 80}, {128, 40}};
  std::vector<Case> all;
  for (size_t i = 0; i < 132; ++i) {
    Case c;
    c.bias = kBiases[i % std::size(kBiases)];
    c.dtype = kDtypes[i % 9 == 8 ? 3 : i % 3];
    c.layout = kLayouts[i / 3 % std::size(kLayouts)];
    std::tie(c.sq, c.sk) = kLengths[i % std::size(kLengths)];
    std::tie(c.hq, c.hk) = kHeads[i / 2 % std::size(kHeads)];
    std::tie(c.d, c.dv) = kDims[i / 4 % std::size(kDims)];
    if (c.layout == Layout::kQkv) {
      c.sk = c.sq;
      c.dv = c.d;
    }
    c.batch = c.packed() ? 1 : 2;
    c.mask = masks[i % std::size(masks)];
    c.softcap = i % 4 == 1 ? 2 : 0;
    c.alibi = i % 5 == 3 ? Alibi::kBatchHeads : Alibi::kNone;
    if (c.packed() && c.alibi == Alibi::kBatchHeads) c.alibi = Alibi::kHeads;
    c.dropout = i % 6 == 2 ? 0.25 : 0;
    c.seqused_q = i % 7 == 5;
    c.seqused = i % 8 == 6;
    c.sinks = i % 3 == 1;
    c.dlse = i % 2 == 1;
    all.push_back(c);
  }
  return all;
}

class DenseBiasCase : public OnEngine<std::tuple<Case, EngineInfo>> {};

TEST_P(DenseBiasCase, EveryOption) {
  const Case& c = std::get<Case>(GetParam());
  Workload w(c, c.seed());
  w.options.engine = engine();
  if (!runs(w)) return;
  const Expected e = expect(w);
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
  EXPECT_TRUE(w.check_memory());
}

INSTANTIATE_TEST_SUITE_P(, DenseBiasCase,
                         testing::Combine(testing::ValuesIn(cases()),
                                          testing::ValuesIn(engines_here())),
                         [](const auto& info) {
                           return std::get<EngineInfo>(info.param).name + "_" +
                                  std::to_string(info.index);
                         });

// A bool is a bias of 0 and -inf: bit by bit, but on GPUs, where tiles depend on its dtype.
TEST_P(DenseBias, OfBoolsIsOfZerosAndInfinities) {
  Case c{.dtype = DType::kBF16, .batch = 2, .sq = 70, .sk = 130, .hq = 4, .hk = 2};
  c.bias = Bias::kPairs;
  Workload bools(c, 3), numbers(c, 3);
  const std::vector<double> seen = read(bools.forward.bias);
  std::vector<double> bias;
  for (const double x : seen) bias.push_back(x != 0 ? 0 : -kInf);
  const Dense dense(DType::kF32, {1, 1, c.sq, c.sk});
  write(dense.tensor(), bias);
  numbers.forward.bias = numbers.backward.bias = dense.tensor();
  for (Workload* w : {&bools, &numbers}) {
    w->options.engine = engine();
    if (!runs(*w)) return;
  }
  EXPECT_TRUE(forward_is_right(bools, expect_forward(bools)));
  if (on_cuda()) return;
  EXPECT_EQ(bits(bools.forward.out), bits(numbers.forward.out));
  EXPECT_EQ(bits(bools.forward.lse), bits(numbers.forward.lse));
  for (const auto t : {&BackwardTensors::dq, &BackwardTensors::dk, &BackwardTensors::dv}) {
    EXPECT_EQ(bits(bools.backward.*t), bits(numbers.backward.*t));
  }
}

// Wide heads, whose tiles and those of the bias share what memory a kernel has.
TEST_P(DenseBias, OfWideHeads) {
  for (const auto& [d, dv] : {std::pair{160, 96}, {256, 256}, {512, 300}}) {
    Case c{.dtype = DType::kBF16, .batch = 1, .sq = 70, .sk = 100, .hq = 2, .hk = 1};
    c.d = d;
    c.dv = dv;
    c.bias = Bias::kAll;
    Workload w(c, 11);
    w.options.engine = engine();
    ASSERT_EQ(w.forward.bias.dtype, DType::kF32);
    if (!runs(w)) continue;
    const Expected e = expect(w);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// What keys hold that a bias hides from a query does not touch it, whatever it is.
TEST_P(DenseBias, PoisonInHiddenKeys) {
  for (const DType dtype : kDtypes) {
    for (const double poison : {kNan, kInf, 0x1p120}) {
      Case c{.dtype = dtype, .batch = 1, .sq = 150, .sk = 150, .hq = 2, .hk = 1, .d = 24};
      c.bias = Bias::kShared;
      Workload w(c, 5);
      w.options.engine = engine();
      std::vector<double> bias = read(w.forward.bias);
      for (int64_t i = 0; i < c.sq; ++i) bias[i * c.sk + 70] = i % 5 == 0 ? 0 : -kInf;
      write(w.forward.bias, bias);
      for (Tensor t : {w.forward.k, w.forward.v}) {
        t.data = static_cast<std::byte*>(t.data) + 70 * t.strides[1] * size_of(t.dtype);
        t.shape[1] = 1;
        write(t, std::vector<double>(static_cast<size_t>(t.numel()), poison));
      }
      w.seal();
      if (!runs(w)) return;
      // Rows that see a large key have its V: what of them is off says nothing of the others.
      const Expected e = expect_forward(w);
      if (!std::isfinite(poison)) {
        EXPECT_TRUE(forward_is_right(w, e)) << name_of(dtype) << poison;
      }
      const std::vector<double> out = read(w.forward.out);
      // dQ of the queries that do not see the key, and what the bias of these gets.
      const std::vector<double> dq = read(w.backward.dq), dbias = read(w.backward.dbias);
      for (int64_t i = 0; i < c.sq; ++i) {
        if (i % 5 == 0) continue;
        for (int64_t n = i * c.hq * c.dv; n < (i + 1) * c.hq * c.dv; ++n) {
          EXPECT_NEAR(out[n], e.reference.out[n], 0.03) << name_of(dtype) << poison;
        }
        for (int64_t n = 0; n < c.hq * c.d; ++n) EXPECT_TRUE(std::isfinite(dq[i * c.hq * c.d + n]));
        for (int64_t n = 0; n < c.sk; ++n) EXPECT_TRUE(std::isfinite(dbias[i * c.sk + n]));
        EXPECT_EQ(dbias[i * c.sk + 70], 0);
      }
    }
  }
}

// NaN and +inf in a bias spoil their row and no other, in the first tile of keys and after it.
TEST_P(DenseBias, WhatIsNoNumberSpoilsItsRow) {
  for (const DType dtype : kDtypes) {
    for (const auto& [x, kind] : {std::pair{kNan, Bias::kAll}, std::pair{kInf, Bias::kAll},
                                  std::pair{kNan, Bias::kHeads}, std::pair{kInf, Bias::kHeads}}) {
      for (const int64_t key : {33, 100}) {
        Case c{.dtype = dtype, .batch = 1, .sq = 140, .sk = 150, .hq = 2, .hk = 2, .d = 16};
        c.bias = kind;  // of f32, and of what q is
        Workload w(c, 6);
        w.options.engine = engine();
        std::vector<double> bias = read(w.forward.bias);
        bias[7 * c.sk + key] = x;  // of head 0
        write(w.forward.bias, bias);
        w.seal();
        if (!computes([&] { w.run_forward(); })) return;
        const std::vector<double> out = read(w.forward.out);
        for (int64_t i = 0; i < c.sq; ++i) {
          for (int64_t h = 0; h < c.hq; ++h) {
            EXPECT_EQ(std::isnan(out[(i * c.hq + h) * c.dv]), i == 7 && h == 0) << i << " " << h;
          }
        }
      }
    }
  }
}

// Nor do NaN and +inf for a key that the bounds hide spoil anything, and gradients of other rows
// than theirs they never spoil.
TEST_P(DenseBias, WhatIsNoNumberAfterTheDiagonal) {
  for (const double x : {kNan, kInf}) {
    for (const int64_t d : {16, 24}) {
      Case c{.dtype = DType::kBF16, .batch = 1, .sq = 250, .sk = 250, .hq = 2, .hk = 2, .d = d};
      c.bias = Bias::kHeads;
      c.mask = causal();
      Workload w(c, 16);
      w.options.engine = engine();
      std::vector<double> bias = read(w.forward.bias);
      for (const int64_t row : {0, 62, 63, 130, 192}) bias[row * c.sk + row + 1] = x;
      write(w.forward.bias, bias);
      w.seal();
      if (!runs(w)) return;
      const Expected e = expect(w);
      EXPECT_TRUE(forward_is_right(w, e)) << x << " " << d;
      EXPECT_TRUE(backward_is_right(w, e)) << x << " " << d;
      bias[60 * c.sk + 50] = x;  // of head 0
      write(w.forward.bias, bias);
      w.seal();
      if (!runs(w)) return;
      const std::vector<double> dq = read(w.backward.dq);
      for (int64_t i = 0; i < c.sq; ++i) {
        for (int64_t h = 0; h < c.hq; ++h) {
          EXPECT_EQ(std::isnan(dq[(i * c.hq + h) * c.d]), i == 60 && h == 0) << i << " " << h;
        }
      }
    }
  }
}

// Products multiply a bias of bf16 with 1 / scale in one number of bf16 or two.
TEST_P(DenseBias, OfAnyScale) {
  for (const double scale : {0.125, 0.3, 0.02, 0.001, 0.7}) {
    Case c{.dtype = DType::kBF16, .batch = 1, .sq = 200, .sk = 150, .hq = 2, .hk = 1, .d = 40};
    c.bias = Bias::kHeads;
    Workload w(c, 17);
    w.options.engine = engine();
    w.options.scale = scale;
    w.seal();
    if (!runs(w)) return;
    const Expected e = expect(w);
    EXPECT_TRUE(forward_is_right(w, e)) << scale;
    EXPECT_TRUE(backward_is_right(w, e)) << scale;
  }
}

// Long rows of keys, in splits where multiprocessors are left over: some rows see keys of one half
// of them alone, or none.
TEST_P(DenseBias, OfManyKeys) {
  for (const int64_t sq : {100, 190}) {
    for (const Mask& mask : {full(), causal()}) {
      Case c{.dtype = DType::kBF16, .batch = 1, .sq = sq, .sk = 1536, .hq = 3, .hk = 1, .d = 16};
      c.bias = Bias::kShared;
      c.mask = mask;
      Workload w(c, 13);
      w.options.engine = engine();
      std::vector<double> bias = read(w.forward.bias);
      for (int64_t i = 0; i < c.sq; ++i) {
        const auto row = bias.begin() + i * c.sk;
        if (i % 2 == 1) std::fill(row, row + c.sk / 2, -kInf);
        if (i % 4 >= 2) std::fill(row + c.sk / 2, row + c.sk, -kInf);
      }
      write(w.forward.bias, bias);
      w.seal();
      if (!computes([&] { w.run_forward(); })) return;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w))) << c.name();
    }
  }
}

// On four multiprocessors these rows are in blocks of two strips, and of two and of three.
TEST_P(DenseBias, OfShorterBlocks) {
  for (const int64_t sq : {500, 1280}) {
    Case c{.dtype = DType::kBF16, .batch = 1, .sq = sq, .sk = 130, .hq = 1, .hk = 1, .d = 72};
    c.bias = Bias::kShared;
    Workload w(c, 14);
    w.options.engine = engine();
    w.seal();
    if (!computes([&] { w.run_forward(); })) return;
    EXPECT_TRUE(forward_is_right(w, expect_forward(w))) << c.name();
  }
}

// Bounds that cut the first one or two tiles of a strip, or the last ones.
TEST_P(DenseBias, OfManyTilesInBounds) {
  struct Form {
    int64_t sq, sk;
    Mask mask;
  };
  for (const Form& form :
       {Form{500, 500, full()}, Form{500, 500, causal()}, Form{500, 537, causal()},
        Form{500, 850, window(333, -1)}, Form{500, 850, window(-1, 70)}}) {
    Case c{.dtype = DType::kBF16, .batch = 1, .sq = form.sq, .sk = form.sk, .hq = 2, .hk = 1};
    c.d = c.dv = 72;
    c.mask = form.mask;
    c.bias = Bias::kShared;
    Workload w(c, 15);
    w.options.engine = engine();
    w.seal();
    if (!computes([&] { w.run_forward(); })) return;
    EXPECT_TRUE(forward_is_right(w, expect_forward(w))) << c.name();
  }
}

// A bias of -inf alone leaves empty rows.
TEST_P(DenseBias, ThatHidesAllKeys) {
  Case c{.dtype = DType::kBF16, .batch = 2, .sq = 50, .sk = 70, .hq = 2, .hk = 1};
  c.bias = Bias::kKeys;
  Workload w(c, 7);
  w.options.engine = engine();
  write(w.forward.bias, std::vector<double>(static_cast<size_t>(w.forward.bias.numel())));
  w.seal();
  if (!runs(w)) return;
  for (const double x : read(w.forward.out)) EXPECT_EQ(x, 0);
  for (const double x : read(w.forward.lse)) EXPECT_EQ(x, -kInf);
  for (const Tensor& t : {w.backward.dq, w.backward.dk, w.backward.dv}) {
    for (const double x : read(t)) EXPECT_EQ(x, 0);
  }
}

// A bias hides all keys from the last rows, so that all of their tiles are skipped.
TEST_P(DenseBias, ThatHidesTheLastRows) {
  for (const bool of_keys : {false, true}) {
    Case c{.dtype = DType::kBF16, .batch = 1, .sq = 130, .sk = 190};
    c.bias = Bias::kShared;
    Workload w(c, 10);
    w.options.engine = engine();
    w.options.threads = 1;
    const Dense bias(DType::kF32, {1, 1, c.sq, of_keys ? c.sk : 1});
    std::vector<double> values(static_cast<size_t>(bias.tensor().numel()), -kInf);
    const int64_t seen = 32 * bias.tensor().shape[3];
    for (int64_t n = 0; n < seen; ++n)
      values[static_cast<size_t>(n)] = 0.1 * static_cast<double>(n % 9);
    write(bias.tensor(), values);
    w.forward.bias = w.backward.bias = bias.tensor();
    w.backward.dbias = {};
    if (!runs(w)) return;
    const Expected e = expect(w);
    EXPECT_TRUE(forward_is_right(w, e)) << of_keys;
    EXPECT_TRUE(backward_is_right(w, e)) << of_keys;
  }
}

// No row sees a key of the first 512, which the CPU engine takes together for as many rows.
TEST_P(DenseBias, ThatHidesAChunkOfKeys) {
  Case c{.dtype = DType::kBF16, .batch = 1, .sq = 1024, .sk = 600};
  c.bias = Bias::kShared;
  Workload w(c, 11);
  w.options.engine = engine();
  w.options.threads = 1;
  const Dense bias(DType::kF32, {1, 1, 1, c.sk});
  std::vector<double> values(static_cast<size_t>(c.sk), 0.5);
  std::fill_n(values.begin(), 512, -kInf);
  write(bias.tensor(), values);
  w.forward.bias = w.backward.bias = bias.tensor();
  w.backward.dbias = {};
  if (!runs(w)) return;
  EXPECT_TRUE(forward_is_right(w, expect(w)));
}

// Tiles of a bias of one number alone, some but for their last one: 0, what hides, and the lowest
// numbers of a dtype, which hide, too. Few rows and many have different kernels.
TEST_P(DenseBias, TilesOfOneNumber) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kBool}) {
    for (const int64_t sq : {3, 190}) {
      const bool bools = dtype == DType::kBool;
      const double lowest = dtype == DType::kF32 || dtype == DType::kBF16 ? -0x1.fcp127 : -kInf;
      for (const double hidden : {bools ? 0 : -kInf, bools ? 0 : lowest}) {
        Case c{.dtype = usual(), .batch = 1, .sq = sq, .sk = 448, .hq = 2, .hk = 1};
        c.bias = Bias::kShared;
        Workload w(c, 9);
        w.options.engine = engine();
        std::vector<double> bias(static_cast<size_t>(c.sq * c.sk), bools ? 1 : 0);
        for (int64_t i = 0; i < c.sq; ++i) {
          double* const row = bias.data() + i * c.sk;
          std::fill(row + std::min(c.sk, i + 70), row + c.sk - 64, hidden);
          if (i % 90 == 47) row[127] = bools ? 1 : -1;
          if (i % 90 == 3) row[319] = bools ? 1 : 0.5;
        }
        const Dense dense(dtype, {1, 1, c.sq, c.sk});
        write(dense.tensor(), bias);
        w.forward.bias = w.backward.bias = dense.tensor();
        w.backward.dbias = {};
        if (!runs(w)) return;
        const Expected e = expect(w);
        EXPECT_TRUE(forward_is_right(w, e)) << name_of(dtype) << sq << hidden;
        EXPECT_TRUE(backward_is_right(w, e)) << name_of(dtype) << sq << hidden;
      }
    }
  }
}

// A sequence has the same bits whatever its batch and the number of threads.
TEST_P(DenseBias, InvariantToTheBatch) {
  Case c{.dtype = usual(), .batch = 3, .sq = 70, .sk = 150, .hq = 4, .hk = 2, .d = 32};
  c.bias = Bias::kAll;
  Workload all(c, 8);
  all.options.engine = engine();
  all.options.invariant = true;
  if (!computes([&] { all.run_forward(); })) return;
  const std::vector<double> want = read(all.forward.out);
  all.options.threads = 1;
  ForwardTensors last = all.forward;
  for (Tensor* t : {&last.q, &last.k, &last.v, &last.out, &last.lse, &last.bias}) {
    t->data = static_cast<std::byte*>(t->data) + 2 * t->strides[0] * size_of(t->dtype);
    t->shape[0] = 1;
  }
  all.seal();
  compute(last, all.options, all.run_options);
  const std::vector<double> got = read(last.out);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), want.end() - static_cast<int64_t>(got.size())));
}

// Few queries have the same bits whether the heads of a key lie side by side or not, of which the
// bias hides keys from some.
TEST_P(DenseBias, InvariantToTheLayoutOfHeads) {
  for (const DType dtype : kDtypes) {
    Case c{.dtype = dtype, .batch = 4, .sq = 1, .sk = 12, .hq = 4, .hk = 4, .d = 40, .dv = 24};
    c.bias = Bias::kAll;
    Workload side_by_side(c, 13);
    c.layout = Layout::kBhsd;
    Workload apart(c, 13);
    for (const auto tensor :
         {&ForwardTensors::q, &ForwardTensors::k, &ForwardTensors::v, &ForwardTensors::bias}) {
      write(apart.forward.*tensor, read(side_by_side.forward.*tensor));
    }
    for (Workload* w : {&side_by_side, &apart}) {
      w->options.engine = engine();
      w->options.invariant = true;
      if (!computes([&] { w->run_forward(); })) return;
    }
    EXPECT_EQ(read(apart.forward.out), read(side_by_side.forward.out)) << name_of(dtype);
  }
}

// Tree masks hide keys, and the bias does.
TEST_P(DenseBias, WithTreeMasks) {
  for (const int64_t sq : {5, 40}) {
    for (const Bias bias : {Bias::kAll, Bias::kPairs}) {
      Case c{.dtype = DType::kBF16, .batch = 2, .sq = sq, .sk = 150, .hq = 4, .hk = 2, .d = 48};
      c.tree = sq == 5 ? Tree::kAncestors : Tree::kRandom;
      c.bias = bias;
      Workload w(c, 12);
      w.options.engine = engine();
      if (!computes([&] { w.run_forward(); })) return;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w))) << c.name();
    }
  }
}

// The gradient has the same bits whatever the number of threads, summed or not.
TEST_P(DenseBias, GradientsOfAnyNumberOfThreads) {
  for (const Bias bias : {Bias::kAll, Bias::kHeads, Bias::kShared, Bias::kBatches, Bias::kRows}) {
    Case c{.dtype = DType::kBF16, .batch = 3, .sq = 90, .sk = 700, .hq = 4, .hk = 2, .d = 32};
    c.bias = bias;
    SCOPED_TRACE(c.name());
    Workload w(c, 11);
    w.options.engine = engine();
    w.options.threads = 1;
    if (!runs(w)) return;
    const auto want = bits(w.backward.dbias);
    for (const int threads : {2, 7}) {
      w.options.threads = threads;
      w.run_backward();
      EXPECT_EQ(bits(w.backward.dbias), want);
    }
  }
}

// Nothing else is written where there is neither a row nor a key.
TEST_P(DenseBias, GradientWithoutRows) {
  const Dense rows(DType::kF32, {2, 0, 3, 16}), lse(DType::kF32, {2, 3, 0}),
      bias(DType::kF32, {1, 3, 1, 1}), dbias(DType::kF32, {1, 3, 1, 1});
  write(bias.tensor(), std::vector<double>{1, 2, 3});
  write(dbias.tensor(), std::vector<double>(3, kNan));
  BackwardTensors t;
  for (Tensor* x : {&t.dout, &t.q, &t.k, &t.v, &t.out, &t.dq, &t.dk, &t.dv}) *x = rows.tensor();
  t.lse = lse.tensor();
  t.bias = bias.tensor();
  t.dbias = dbias.tensor();
  Options options;
  options.engine = engine();
  if (!computes([&] { compute(t, options, {}); })) return;
  EXPECT_EQ(read(dbias.tensor()), (std::vector<double>{0, 0, 0}));
}

// Caches of pages, with a bias of more keys than the longest sequence.
TEST_P(DenseBias, OfACache) {
  for (const int64_t sq : {1, 40}) {
    Case c{
        .dtype = DType::kBF16, .batch = 3, .sq = sq, .sk = 100, .hq = 4, .hk = 2, .seqused = true};
    c.bias = Bias::kAll;
    Workload w(c, 9);
    w.options.engine = engine();
    if (!runs(w)) continue;
    const auto want = bits(w.forward.out);
    const Cached cached(w, {CacheShape::Order::kNhd, CacheShape::Index::kTable, 16}, 10);
    const Dense wide(DType::kF32, {c.batch, c.hq, sq, 160});
    write(wide.tensor(), std::vector<double>(static_cast<size_t>(wide.tensor().numel())));
    Tensor part = wide.tensor();
    part.shape[3] = c.sk;
    write(part, read(w.forward.bias));
    ForwardTensors paged = cached.forward;
    paged.bias = wide.tensor();
    w.seal();
    compute(paged, w.options, w.run_options);
    EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
    if (on_cuda()) continue;
    EXPECT_EQ(bits(w.forward.out), want);
  }
}

FULGUR_EVERY_ENGINE(DenseBias);

}  // namespace
}  // namespace fulgur::test
