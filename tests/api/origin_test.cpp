// Calls that compute a part of a larger one (Options::origin), or some of its gradients: the same
// bits, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class OriginTest : public EveryEngine {};

/// Elements [begin, begin + count) of a dimension.
Tensor slice(Tensor t, int dim, int64_t begin, int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + begin * t.strides[dim] * size_of(t.dtype);
  t.shape[dim] = count;
  return t;
}

/// Runs of a sequence that begin at multiples of 64.
std::vector<std::pair<int64_t, int64_t>> runs_of(int64_t length) {
  std::vector<std::pair<int64_t, int64_t>> runs;
  int64_t size = 64;
  for (int64_t begin = 0; begin < length; size = size == 64 ? 192 : 64) {
    runs.emplace_back(begin, std::min(length, begin + size));
    begin += size;
  }
  return runs;
}

/// The part of a call that has these queries, of all keys.
struct QueryPart {
  ForwardTensors forward;
  BackwardTensors backward;
};

QueryPart queries_of(const Workload& w, int64_t begin, int64_t end) {
  QueryPart part{w.forward, w.backward};
  ForwardTensors& f = part.forward;
  BackwardTensors& g = part.backward;
  for (Tensor* t : {&f.q, &f.out, &g.q, &g.out, &g.dout, &g.dq}) {
    *t = slice(*t, 1, begin, end - begin);
  }
  for (Tensor* t : {&f.lse, &g.lse, &g.dlse}) {
    if (t->given()) *t = slice(*t, 2, begin, end - begin);
  }
  return part;
}

std::vector<Case> cases() {
  return {
      {.dtype = DType::kF32, .batch = 2, .sq = 333, .sk = 333, .hq = 4, .hk = 2, .mask = causal()},
      {.dtype = DType::kBF16,
       .sq = 333,
       .sk = 400,
       .hq = 4,
       .hk = 1,
       .d = 64,
       .dv = 80,
       .mask = causal(),
       .dlse = true},
      {.dtype = DType::kBF16,
       .sq = 260,
       .sk = 260,
       .hq = 3,
       .hk = 3,
       .mask = window(70, 20),
       .alibi = Alibi::kHeads,
       .dropout = 0.3},
      {.dtype = DType::kF16,
       .sq = 300,
       .sk = 200,
       .hq = 2,
       .hk = 1,
       .mask = chunked(100, window(-1, 30)),
       .softcap = 5,
       .sinks = true},
      {.dtype = DType::kF32,
       .sq = 200,
       .sk = 330,
       .hq = 2,
       .hk = 2,
       .mask = top_left(chunked(90, causal())),
       .alibi = Alibi::kHeads,
       .dropout = 0.2},
      {.dtype = DType::kF32, .sq = 130, .sk = 130, .hq = 1, .hk = 1},
      {.dtype = DType::kF64, .sq = 150, .sk = 150, .mask = causal(), .dropout = 0.2},
      {.dtype = DType::kBF16,
       .sq = 500,
       .sk = 500,
       .hq = 4,
       .hk = 2,
       .d = 128,
       .dv = 128,
       .mask = window(120, 40),
       .alibi = Alibi::kHeads},
      {.dtype = DType::kBF16, .sq = 300, .sk = 350, .hq = 4, .hk = 4, .mask = top_left(causal())},
      {.dtype = DType::kF16, .sq = 200, .sk = 300, .hq = 2, .hk = 1, .softcap = 3, .sinks = true},
  };
}

TEST_P(OriginTest, QueriesOfALongerSequence) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    w.options.engine = engine();
    w.options.invariant = w.options.deterministic = true;
    if (!runs(w)) continue;
    const auto out = bits(w.forward.out), lse = bits(w.forward.lse), dq = bits(w.backward.dq);
    std::vector<std::pair<BackwardTensors, Options>> parts;
    w.seal();
    bool computed = true;
    for (const auto& [begin, end] : runs_of(c.sq)) {
      Options options = w.options;
      options.origin = {.query = begin, .queries = c.sq};
      const QueryPart part = queries_of(w, begin, end);
      computed &= computes([&] { compute(part.forward, options, w.run_options); });
      parts.emplace_back(part.backward, options);
    }
    if (!computed) continue;
    EXPECT_EQ(bits(w.forward.out), out);
    EXPECT_EQ(bits(w.forward.lse), lse);
    for (auto& [part, options] : parts) {
      part.dsinks = {};
      compute(part, options, w.run_options);
    }
    EXPECT_EQ(bits(w.backward.dq), dq);
  }
}

TEST_P(OriginTest, KeysOfALongerSequence) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 2);
    w.options.engine = engine();
    w.options.invariant = w.options.deterministic = true;
    if (!runs(w)) continue;
    const auto dk = bits(w.backward.dk), dv = bits(w.backward.dv);
    w.seal();
    w.run_forward();
    bool computed = true;
    for (const auto& [begin, end] : runs_of(c.sk)) {
      BackwardTensors g = w.backward;
      for (Tensor* t : {&g.k, &g.v, &g.dk, &g.dv}) *t = slice(*t, 1, begin, end - begin);
      g.dsinks = {};
      Options options = w.options;
      options.origin = {.key = begin, .keys = c.sk};
      computed &= computes([&] { compute(g, options, w.run_options); });
    }
    if (!computed) continue;
    EXPECT_EQ(bits(w.backward.dk), dk);
    EXPECT_EQ(bits(w.backward.dv), dv);
  }
}

// Dropout counts heads and sequences, too.
TEST_P(OriginTest, HeadsAndSequencesOfALargerCall) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{.dtype = dtype, .batch = 3, .sq = 70, .sk = 70, .hq = 6, .hk = 3, .dropout = 0.4};
    SCOPED_TRACE(c.name());
    Workload w(c, 3);
    w.options.engine = engine();
    w.options.invariant = w.options.deterministic = true;
    if (!runs(w)) continue;
    const auto out = bits(w.forward.out), dk = bits(w.backward.dk);
    w.seal();
    std::vector<std::pair<BackwardTensors, Options>> parts;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t kv = 0; kv < c.hk; ++kv) {
        ForwardTensors f = w.forward;
        BackwardTensors g = w.backward;
        for (Tensor* t : {&f.q, &f.out, &g.q, &g.out, &g.dout, &g.dq}) {
          *t = slice(slice(*t, 0, b, 1), 2, 2 * kv, 2);
        }
        for (Tensor* t : {&f.k, &f.v, &g.k, &g.v, &g.dk, &g.dv}) {
          *t = slice(slice(*t, 0, b, 1), 2, kv, 1);
        }
        for (Tensor* t : {&f.lse, &g.lse}) *t = slice(slice(*t, 0, b, 1), 1, 2 * kv, 2);
        Options options = w.options;
        options.origin = {.batch = b, .head = 2 * kv, .heads = c.hq};
        compute(f, options, w.run_options);
        parts.emplace_back(g, options);
      }
    }
    EXPECT_EQ(bits(w.forward.out), out);
    for (auto& [part, options] : parts) compute(part, options, w.run_options);
    EXPECT_EQ(bits(w.backward.dk), dk);
  }
}

// dk and dv in f32 are those of 16 bits before they are rounded.
TEST_P(OriginTest, GradientsOfKeysInF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Case c{.dtype = dtype, .sq = 150, .sk = 150, .hq = 4, .hk = 2, .mask = causal()};
    SCOPED_TRACE(c.name());
    Workload w(c, 4);
    w.options.engine = engine();
    w.options.invariant = true;
    if (!runs(w)) continue;
    const auto shape = {c.batch, c.sk, c.hk, c.d};
    const Dense dk(DType::kF32, shape), dv(DType::kF32, shape);
    BackwardTensors g = w.backward;
    g.dk = dk;
    g.dv = dv;
    if (!computes([&] { compute(g, w.options, w.run_options); })) continue;
    for (const auto& [exact, rounded_to] :
         {std::pair{dk.tensor(), w.backward.dk}, std::pair{dv.tensor(), w.backward.dv}}) {
      const std::vector<double> got = read(exact), want = read(rounded_to);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(rounded(got[i], dtype), want[i]) << i;
    }
  }
}

// dq alone, and dk and dv alone, are those of a call that computes all of them.
TEST_P(OriginTest, GradientsLeftOut) {
  std::vector<Case> all = cases();
  const Case packed{.dtype = DType::kBF16,
                    .batch = 3,
                    .sq = 150,
                    .sk = 170,
                    .hq = 2,
                    .hk = 1,
                    .mask = causal(),
                    .layout = Layout::kPackedPadded,
                    .seqused = true};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    Case c = packed;
    c.dtype = dtype;
    all.push_back(c);
    c.layout = Layout::kPadded;
    c.seqused_q = true;
    c.bias = Bias::kHeads;
    all.push_back(c);
    all.push_back({.dtype = dtype,
                   .sq = 100,
                   .sk = 140,
                   .hq = 4,
                   .hk = 2,
                   .d = 256,
                   .dv = 256,
                   .mask = causal(),
                   .dlse = true});
    all.push_back({.dtype = dtype, .sq = 90, .sk = 90, .d = 192, .dv = 128, .softcap = 4});
  }
  for (const Case& c : all) {
    for (const bool invariant : {true, false}) {
      SCOPED_TRACE(c.name() + (invariant ? " invariant" : ""));
      Workload w(c, 6);
      w.options.engine = engine();
      w.options.invariant = w.options.deterministic = invariant;
      if (!runs(w)) continue;
      const auto gradients = [&] {
        return std::array{w.backward.dq, w.backward.dk, w.backward.dv};
      };
      std::vector<std::vector<std::byte>> want_bits;
      std::vector<std::vector<double>> want;
      for (const Tensor& t : gradients()) want_bits.push_back(bits(t)), want.push_back(read(t));
      w.seal();
      w.run_forward();
      BackwardTensors of_queries = w.backward, of_keys = w.backward;
      of_queries.dk = of_queries.dv = {};
      of_keys.dq = {};
      of_keys.dsinks = {};
      of_keys.dbias = {};
      compute(of_queries, w.options, w.run_options);
      compute(of_keys, w.options, w.run_options);
      EXPECT_TRUE(w.check_memory());
      for (size_t i = 0; i < want.size(); ++i) {
        const Tensor t = gradients()[i];
        if (invariant) {
          EXPECT_EQ(bits(t), want_bits[i]) << i;
        }
        double most = 0, off = 0;
        const std::vector<double> got = read(t);
        for (size_t at = 0; at < got.size(); ++at) {
          most = std::max(most, std::abs(want[i][at]));
          off = std::max(off, std::abs(got[at] - want[i][at]));
        }
        EXPECT_LE(off, 0.02 * most) << i;
      }
    }
  }
}

FULGUR_EVERY_ENGINE(OriginTest);

TEST(OriginErrors, NameTheField) {
  const Case c{.sq = 64, .sk = 64};
  const auto message = [&](const Case& of, const Origin& origin) {
    Workload w(of, 1);
    w.options.origin = origin;
    return message_of([&] { w.run_forward(); });
  };
  EXPECT_EQ(message(c, {.batch = -1}), "origin.batch: got -1, want >= 0");
  EXPECT_EQ(message(c, {.query = -64}), "origin.query: got -64, want >= 0");
  EXPECT_EQ(message(c, {.key = 2}), "origin.key: got 2, want a multiple of 4");
  EXPECT_EQ(message(c, {.query = 64, .queries = 100}),
            "origin.queries: got 100, want at least 128, where this call ends");
  EXPECT_EQ(message(c, {.head = 1, .heads = 1}),
            "origin.heads: got 1, want at least 2, where this call ends");
  Case packed = c;
  packed.layout = Layout::kPacked;
  EXPECT_EQ(message(packed, {.query = 64}),
            "origin: given with lengths or caches, want sequences of one length alone");
  Case tree = c;
  tree.tree = Tree::kRandom;
  EXPECT_EQ(message(tree, {.query = 64}),
            "origin: given with a tree_mask, want sequences of one length alone");
  Workload w({.dtype = DType::kBF16, .sq = 64, .sk = 64}, 1);
  const Dense dk(DType::kF32, {1, 64, 1, 64});
  w.backward.dk = dk;
  EXPECT_EQ(message_of([&] { w.run_backward(); }), "dv: got bf16, want f32, the dtype of dk");
}

}  // namespace
}  // namespace fulgur::test
