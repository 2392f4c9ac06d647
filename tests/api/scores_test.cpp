// Scores and probabilities: those that the oracle's O and LSE are made of, stage by stage, and for
// chosen rows.
#include "fulgur/scores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "cached.h"
#include "call.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr ScoreStage kStages[] = {ScoreStage::kScaled, ScoreStage::kSoftcap, ScoreStage::kMasked,
                                  ScoreStage::kProbabilities};

ScoresArgs args_of(const ForwardTensors& t, ScoreStage stage) {
  return {.q = t.q,
          .k = t.k,
          .alibi_slopes = t.alibi_slopes,
          .sinks = t.sinks,
          .tree_mask = t.tree_mask,
          .bias = t.bias,
          .lengths = {t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_q, t.seqused_k},
          .cache = {t.page_table, t.page_indptr, t.cache_batch_idx, t.leftpad_k},
          .stage = stage};
}

// The scores of a call, in row-major order of (batch, hq, rows, sk), with gaps between the rows.
struct Scores {
  std::array<int64_t, 4> shape;
  std::vector<double> values;

  /// `rows`: those that are chosen, in the host's memory, or on the device of q if `on_device`.
  Scores(const ForwardTensors& tensors, ScoreStage stage, Options options, const Tensor& rows = {},
         bool on_device = false) {
    EngineMemory memory(options.engine);
    ScoresArgs args = args_of(memory.at(tensors), stage);
    args.rows = on_device ? memory.at(rows) : rows;
    options = memory.options(tensors, options);
    shape = scores_shape(args, options);
    const DType dtype = args.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    const int64_t row = shape[3] + 3;
    Storage storage(dtype, shape[0] * shape[1] * shape[2] * row);
    const Tensor result = storage.view(
        0, shape, std::array{shape[1] * shape[2] * row, shape[2] * row, row, int64_t{1}});
    storage.seal();
    args.scores = memory.at(result);
    scores(args, options);
    memory.bring_back();
    EXPECT_TRUE(storage.padding_unchanged());
    values = read(result);
  }
  const double* row(int64_t b, int64_t h, int64_t r) const {
    return values.data() + ((b * shape[1] + h) * shape[2] + r) * shape[3];
  }
};

class ScoresOf : public EveryEngine {
 protected:
  /// Calls `with` with the workload's scores until some stages, unless the engine computes none.
  template <class With>
  void of(Workload& w, std::initializer_list<ScoreStage> stages, const With& with) {
    w.options.engine = engine();
    std::vector<Scores> all;
    const auto call = [&] {
      for (const ScoreStage stage : stages) all.emplace_back(w.forward, stage, w.options);
    };
    if (computes(call)) with(all);
  }
};

// The list of cases, without dropout, which comes after the probabilities.
std::vector<Case> cases() {
  std::vector<Case> all = small_cases();
  for (Case& c : all) c.dropout = 0;
  return all;
}

TEST_P(ScoresOf, MakeTheOutputOfAttention) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    of(w, {ScoreStage::kProbabilities, ScoreStage::kMasked}, [&](const auto& found) {
      const Scores &P = found[0], &S = found[1];
      const Expected e = expect_forward(w);
      const std::vector<double> v = read(w.forward.v);
      const double near = c.dtype == DType::kF64 ? 1e-12 : 1e-5;
      for (size_t b = 0; b < w.sequences.size(); ++b) {
        const Rows& s = w.sequences[b];
        for (int64_t h = 0; h < c.hq; ++h) {
          const double sink = c.sinks ? read(w.forward.sinks)[static_cast<size_t>(h)] : -kInf;
          for (int64_t i = 0; i < s.sq; ++i) {
            const double *p = P.row(static_cast<int64_t>(b), h, i),
                         *x = S.row(static_cast<int64_t>(b), h, i);
            const double lse = e.reference.lse[static_cast<size_t>(w.lse_index(b, h, i))];
            const double close = 10 * near * std::max(1.0, std::fabs(lse));
            double total = lse == -kInf ? 1 : std::exp(sink - lse);
            for (int64_t j = 0; j < P.shape[3]; ++j) {
              total += p[j];
              if (j >= s.sk || x[j] == -kInf) {
                ASSERT_EQ(p[j], 0);
                ASSERT_EQ(x[j], -kInf);
              } else {
                ASSERT_NEAR(p[j], std::exp(x[j] - lse), close);
              }
            }
            ASSERT_NEAR(total, 1, close);
            for (int64_t n = 0; n < c.dv; ++n) {
              double o = 0;
              for (int64_t j = 0; j < s.sk; ++j) {
                if (p[j] == 0) continue;
                const int64_t row = (s.k_begin + j) * c.hk + h / (c.hq / c.hk);
                o += p[j] * v[static_cast<size_t>(row * c.dv + n)];
              }
              const int64_t row = (s.q_begin + i) * c.hq + h;
              ASSERT_NEAR(o, e.reference.out[static_cast<size_t>(row * c.dv + n)], near);
            }
          }
          // Queries and keys that do not exist.
          for (int64_t i = s.sq; i < P.shape[2]; ++i) {
            for (int64_t j = 0; j < P.shape[3]; ++j) {
              ASSERT_EQ(P.row(static_cast<int64_t>(b), h, i)[j], 0);
              ASSERT_EQ(S.row(static_cast<int64_t>(b), h, i)[j], -kInf);
            }
          }
        }
      }
    });
  }
}

// What a mask, ALiBi and a bias do comes after the first two stages.
TEST_P(ScoresOf, BeforeTheMask) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    Case c{.dtype = dtype, .batch = 2, .sq = 5, .sk = 9, .hq = 4, .hk = 2, .d = 24, .dv = 8};
    c.mask = causal();
    c.alibi = Alibi::kHeads;
    c.softcap = 1.5;
    c.sinks = true;
    Workload w(c, 1);
    w.options.scale = 0.3;
    const std::vector<double> q = read(w.forward.q), k = read(w.forward.k);
    of(w, {ScoreStage::kScaled, ScoreStage::kSoftcap}, [&](const auto& found) {
      for (int64_t n = 0; n < c.batch * c.hq * c.sq * c.sk; ++n) {
        const int64_t j = n % c.sk, i = n / c.sk % c.sq, h = n / c.sk / c.sq % c.hq,
                      b = n / c.sk / c.sq / c.hq;
        const auto q_at = q.begin() + ((b * c.sq + i) * c.hq + h) * c.d;
        const auto k_at = k.begin() + ((b * c.sk + j) * c.hk + h / 2) * c.d;
        const double want = 0.3 * std::inner_product(q_at, q_at + c.d, k_at, 0.0);
        ASSERT_NEAR(found[0].values[static_cast<size_t>(n)], want, 1e-6);
        ASSERT_NEAR(found[1].values[static_cast<size_t>(n)], 1.5 * std::tanh(want / 1.5), 1e-6);
      }
    });
  }
}

// Listed in the host's memory, more than a launch takes, or where q lies.
TEST_P(ScoresOf, OfChosenRows) {
  Case c{.dtype = DType::kBF16, .batch = 2, .sq = 150, .sk = 20, .hq = 2, .hk = 1};
  c.mask = window(9, 3);
  c.seqused_q = c.sinks = true;
  c.bias = Bias::kAll;
  Workload w(c, 2);
  std::vector<double> chosen{149, 0, 7, 7, 64};
  while (chosen.size() < 300) chosen.push_back(static_cast<double>(chosen.size() * 7 % 150));
  const Dense rows(DType::kI64, {static_cast<int64_t>(chosen.size())});
  write(rows.tensor(), chosen);
  for (const ScoreStage stage : kStages) {
    of(w, {stage}, [&](const auto& found) {
      for (const bool on_device : {false, true}) {
        const Scores some(w.forward, stage, w.options, rows.tensor(), on_device);
        for (int64_t n = 0; n < c.batch * c.hq; ++n) {
          for (size_t r = 0; r < chosen.size(); ++r) {
            const double* want = found[0].row(n / c.hq, n % c.hq, static_cast<int64_t>(chosen[r]));
            const double* got = some.row(n / c.hq, n % c.hq, static_cast<int64_t>(r));
            ASSERT_TRUE(std::equal(want, want + c.sk, got));
          }
        }
      }
    });
  }
}

// Scores over a cache of pages, or of rows that an index names and that begin with padding, are
// those of the rows side by side. Queries may be packed where keys are not.
TEST_P(ScoresOf, OfACache) {
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    Case c{.dtype = DType::kBF16, .batch = 3, .sq = 4, .sk = 100, .hq = 4, .hk = 2};
    c.layout = layout;
    c.seqused = !c.packed();
    c.mask = causal();
    Workload w(c, 3);
    of(w, {ScoreStage::kProbabilities}, [&](const auto& found) {
      using Index = CacheShape::Index;
      for (const auto& [index, page, leftpad] : {std::tuple{Index::kTable, 16, false},
                                                 {Index::kTable, 16, true},
                                                 {Index::kLists, 16, false},
                                                 {Index::kBatch, 0, false},
                                                 {Index::kBatch, 0, true}}) {
        const CacheShape shape{CacheShape::Order::kNhd, index, page, leftpad};
        SCOPED_TRACE(c.name() + " " + shape.name());
        const Cached cached(w, shape, 4);
        const Scores got(cached.forward, ScoreStage::kProbabilities, w.options);
        ASSERT_GE(got.shape[3], c.sk);
        for (int64_t n = 0; n < static_cast<int64_t>(w.sequences.size()) * c.hq * c.sq; ++n) {
          const int64_t i = n % c.sq, h = n / c.sq % c.hq, b = n / c.sq / c.hq;
          EXPECT_TRUE(
              std::equal(found[0].row(b, h, i), found[0].row(b, h, i) + c.sk, got.row(b, h, i)));
        }
      }
    });
  }
}

FULGUR_EVERY_ENGINE(ScoresOf);

TEST(Scores, OfNothing) {
  for (const auto& [batch, sq, sk] : {std::array<int64_t, 3>{0, 4, 4}, {2, 0, 4}, {2, 4, 0}}) {
    const Dense q(DType::kF32, {batch, sq, 2, 8}), k(DType::kF32, {batch, sk, 1, 8});
    const Dense to(DType::kF32, {batch, 2, sq, sk});
    EXPECT_NO_THROW(scores({.q = q, .k = k, .scores = to}));
  }
}

TEST(Scores, ErrorsNameTheArgument) {
  const Case c{.dtype = DType::kF32, .batch = 2, .sq = 5, .sk = 9, .hq = 4, .hk = 2, .d = 24};
  const Workload w(c, 5);
  const Dense to(DType::kF32, {c.batch, c.hq, c.sq, c.sk}), rows(DType::kI64, {1}),
      one_row(DType::kF32, {c.batch, c.hq, 1, c.sk});
  write(rows.tensor(), std::array{5.0});
  ScoresArgs good = args_of(w.forward, ScoreStage::kMasked);
  good.scores = to;
  const auto fails = [&](auto change, const char* pattern, Status status) {
    ScoresArgs args = good;
    Options options;
    change(args, options);
    const auto call = [&] { scores(args, options); };
    EXPECT_EQ(status_of(call), status);
    EXPECT_TRUE(starts_like(message_of(call), pattern));
  };
  constexpr Status kInvalid = Status::kInvalidArgument;
  EXPECT_NO_THROW(scores(good));
  fails([](auto& a, auto&) { a.q = {}; }, "q: ", kInvalid);
  fails([](auto& a, auto&) { a.k = {}; }, "k: ", kInvalid);
  fails([](auto& a, auto&) { a.k.shape[3] = 23; }, "k: got .*23.*24", kInvalid);
  fails([](auto& a, auto&) { a.scores = {}; }, "scores: ", kInvalid);
  fails([](auto& a, auto&) { a.scores.shape[2] = 4; }, "scores: .*rows", kInvalid);
  fails([](auto& a, auto&) { a.scores.dtype = DType::kF64; }, "scores: got f64, want f32",
        kInvalid);
  fails([](auto& a, auto&) { a.scores.data = const_cast<void*>(a.q.data); },
        "scores: shares its memory with q", kInvalid);
  fails([](auto& a, auto&) { a.rows = a.q; }, "rows: ", kInvalid);
  fails(
      [&](auto& a, auto&) {
        a.rows = rows;
        a.scores = one_row;
      },
      "rows: got 5 at 0, want a query of the 5", kInvalid);
  fails([](auto&, auto& o) { o.dropout_p = 0.5; }, "dropout_p: got 0.5, want 0", kInvalid);
  fails([](auto&, auto& o) { o.engine = "abacus"; }, "engine: got \"abacus\"", kInvalid);
  fails([](auto&, auto& o) { o.engine = "cpu"; }, "no engine computes scores of f32 tensors on cpu",
        Status::kUnsupported);
}

TEST(Scores, InC) {
  Case c{.dtype = DType::kF32, .batch = 2, .sq = 5, .sk = 9, .hq = 4, .hk = 2, .seqused = true};
  c.alibi = Alibi::kHeads;
  c.sinks = true;
  c.bias = Bias::kAll;
  const Workload w(c, 6);
  const Dense got(DType::kF32, {c.batch, c.hq, 2, c.sk}), rows(DType::kI64, {2});
  write(rows.tensor(), std::array{4.0, 1.0});
  const Dl q(w.forward.q), k(w.forward.k), to(got.tensor()), chosen(rows.tensor()),
      slopes(w.forward.alibi_slopes), sinks(w.forward.sinks), bias(w.forward.bias),
      used(w.forward.seqused_k);
  auto lengths = c_struct<fulgur_var_len>();
  lengths.seqused_k = used;
  auto args = c_struct<fulgur_scores_args>();
  args.q = q, args.k = k, args.scores = to, args.rows = chosen;
  args.alibi_slopes = slopes, args.sinks = sinks, args.bias = bias, args.lengths = &lengths;
  const fulgur_options options = c_options(w.options);
  for (const ScoreStage stage : kStages) {
    args.stage = static_cast<int>(stage);
    ASSERT_EQ(fulgur_scores(&args, &options, nullptr), FULGUR_OK) << fulgur_last_error();
    EXPECT_EQ(read(got.tensor()), Scores(w.forward, stage, w.options, rows.tensor()).values);
  }
  args.stage = 4;
  EXPECT_EQ(fulgur_scores(&args, &options, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "stage: got 4"));
}

}  // namespace
}  // namespace fulgur::test
