// Calls with score_mod and mask_mod: random expressions with every option, masks that hide whole
// tiles, gradients of the tensors that expressions index, and what calls refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "cached.h"
#include "engines.h"
#include "expression/graph.h"
#include "oracle.h"
#include "random_expression.h"
#include "seed.h"

namespace fulgur::test {
namespace {

using namespace symbols;  // NOLINT(google-build-using-namespace)

constexpr double kInf = std::numeric_limits<double>::infinity();

class Expressions : public EveryEngine {
 protected:
  bool precise() const { return engine() == "reference"; }
  bool on_cuda() const { return engine() == "cuda"; }
  /// What it computes with the most digits.
  DType dtype() const { return precise() ? DType::kF64 : on_cuda() ? DType::kBF16 : DType::kF32; }
  void compute_case(size_t i, uint64_t seed);
  void compare_with_all_looked_at(size_t i, uint64_t seed);
};

/// Tensors that random expressions index, and their memory.
struct BoundTensors {
  std::vector<KnownTensor> known;
  std::vector<TensorBinding> bindings;
  std::deque<Dense> memory;

  void add(const char* name, DType dtype, std::initializer_list<int64_t> shape,
           std::mt19937_64& random) {
    memory.emplace_back(dtype, shape);
    const Tensor& t = memory.back();
    std::vector<double> values(static_cast<size_t>(t.numel()));
    const bool whole = dtype == DType::kI32 || dtype == DType::kI64;
    for (double& x : values) {
      x = whole ? static_cast<double>(random() % 4) : static_cast<double>(random() % 64) / 32 - 1;
    }
    write(t, values);
    known.push_back({{name, dtype, t.rank}, shape, values});
  }
  /// The tensors that some expressions index.
  std::vector<TensorBinding> of(std::initializer_list<Expr> expressions) const {
    const auto graph = expression::make_graph(std::span(expressions.begin(), expressions.size()));
    std::vector<TensorBinding> all;
    for (const TensorSymbol& symbol : graph.tensors) {
      for (size_t i = 0; i < known.size(); ++i) {
        if (known[i].symbol == symbol) all.push_back({symbol.name(), memory[i].tensor()});
      }
    }
    return all;
  }
};

// Values of each factor that do not go in step with those of another.
Case case_of(size_t i, bool f64) {
  constexpr Layout kLayouts[] = {Layout::kBshd, Layout::kPacked, Layout::kPadded, Layout::kBhsd,
                                 Layout::kPackedPadded};
  const Mask masks[] = {full(), causal(), full(), window(20, 3), chunked(24), top_left(causal())};
  constexpr std::pair<int64_t, int64_t> kLengths[] = {{70, 65}, {3, 90}, {100, 150},
                                                      {33, 65}, {1, 80}, {64, 40}};
  constexpr std::pair<int64_t, int64_t> kHeads[] = {{4, 1}, {2, 2}, {6, 2}};
  constexpr DType kDtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  Case c;
  c.dtype = f64 ? DType::kF64 : kDtypes[i % 3];
  c.layout = kLayouts[i % std::size(kLayouts)];
  std::tie(c.sq, c.sk) = kLengths[i / 2 % std::size(kLengths)];
  std::tie(c.hq, c.hk) = kHeads[i / 3 % std::size(kHeads)];
  c.d = i % 2 == 0 ? 16 : 40;
  c.dv = i % 3 == 0 ? 24 : 16;
  c.batch = c.packed() ? 1 : 2;
  c.mask = masks[i % std::size(masks)];
  c.softcap = i % 4 == 1 ? 2 : 0;
  c.alibi = i % 5 == 3 ? Alibi::kHeads : Alibi::kNone;
  c.dropout = i % 6 == 2 ? 0.25 : 0;
  c.seqused = i % 8 == 6;
  c.sinks = i % 3 == 1;
  c.dlse = i % 2 == 1;
  c.bias = i % 7 == 4 ? Bias::kAll : i % 7 == 6 ? Bias::kKeys : Bias::kNone;
  return c;
}

void Expressions::compute_case(size_t i, uint64_t seed) {
  const Case c = case_of(i, precise());
  std::mt19937_64 random(seed * 100 + i);
  BoundTensors tensors;
  tensors.add("doc", DType::kI32, {2, 160}, random);
  tensors.add("wide", DType::kI64, {160}, random);
  tensors.add("row", DType::kF32, {6, 100}, random);
  tensors.add("pair", DType::kBF16, {2, 100, 150}, random);
  RandomExpressions make(seed * 100 + i, tensors.known, true);
  Workload w(c, c.seed());
  w.options.engine = engine();
  if (i % 3 != 0) {
    const KnownExpr e = make.number(1 + static_cast<int>(i) % 4);
    w.options.score_mod = e.expr;
    w.score_value = e.value;
  }
  if (i % 3 != 1) {
    const KnownExpr e = make.condition(1 + static_cast<int>(i) % 3);
    w.options.mask_mod = e.expr;
    w.mask_value = e.value;
  }
  w.forward.tensors = w.backward.tensors = tensors.of({w.options.score_mod, w.options.mask_mod});
  SCOPED_TRACE(c.name() + " " + w.options.score_mod.text() + " | " + w.options.mask_mod.text());
  if (!runs(w)) return;
  const Expected e = expect(w);
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
  EXPECT_TRUE(w.check_memory());
  if (!precise()) return;
  // The oracle's own functions agree with the library's.
  const auto same = [](const std::vector<double>& x, const std::vector<double>& y) {
    double most = 0;
    for (size_t n = 0; n < x.size(); ++n) {
      if (x[n] != y[n]) most = std::max(most, std::fabs(x[n] - y[n]) / (1 + std::fabs(y[n])));
    }
    return most;
  };
  EXPECT_LT(same(e.naive.out, e.reference.out), 1e-9);
  EXPECT_LT(same(e.naive.lse, e.reference.lse), 1e-9);
  EXPECT_LT(same(e.naive.dq, e.reference.dq), 1e-5);
  EXPECT_LT(same(e.naive.dk, e.reference.dk), 1e-5);
  EXPECT_LT(same(e.naive.dv, e.reference.dv), 1e-5);
}

TEST_P(Expressions, EveryOption) {
  for (size_t i = 0; i < 36; ++i) compute_case(i, test_seed());
}

// Some of these cases, for engines that take long.
TEST_P(Expressions, SomeOptions) {
  const uint64_t seed = test_seed();
  for (size_t i = 0; i < 3; ++i) compute_case((seed * 7 + i * 11) % 36, seed);
}

// What hides most tiles, and leaves some whole: values without a score, by the mask alone.
TEST_P(Expressions, MasksOfTiles) {
  struct Known {
    const char* text;
    ValueAt value;
  };
  BoundTensors tensors;
  std::mt19937_64 random(1);
  tensors.add("doc", DType::kI32, {1, 700}, random);
  std::vector<double> ids(700);
  for (int64_t i = 0; i < 700; ++i) ids[i] = static_cast<double>(i / 150);
  write(tensors.memory[0], ids);
  tensors.add("blocks", DType::kBool, {11, 6}, random);
  std::vector<double> blocks(11 * 6);
  for (double& x : blocks) x = random() % 3 == 0 ? 1 : 0;
  write(tensors.memory[1], blocks);
  const Known masks[] = {
      {"blocks[q // 64, k // 128]",
       [&](const ScorePlace& p) { return blocks[p.q / 64 * 6 + p.k / 128]; }},
      {"doc[b, q] == doc[b, k]", [](const ScorePlace& p) { return p.q / 150 == p.k / 150; }},
      {"k < 100 || delta <= 0", [](const ScorePlace& p) { return p.k < 100 || p.k - p.q <= 0; }},
      {"delta <= 0 && (k < 4 || delta > -100)",
       [](const ScorePlace& p) { return p.k <= p.q && (p.k < 4 || p.k - p.q > -100); }},
      {"q // 128 == k // 128", [](const ScorePlace& p) { return p.q / 128 == p.k / 128; }},
      {"(q - k) % 3 == 0", [](const ScorePlace& p) { return (p.q - p.k) % 3 == 0; }},
      {"k // 64 % 2 == q // 64 % 2",
       [](const ScorePlace& p) { return p.k / 64 % 2 == p.q / 64 % 2; }},
      {"q >= 300", [](const ScorePlace& p) { return p.q >= 300; }},
      {"false", [](const ScorePlace&) { return false; }},
  };
  for (const Known& mask : masks) {
    SCOPED_TRACE(mask.text);
    Case c{.dtype = dtype(), .sq = 700, .sk = 700, .d = 8, .dv = 8};
    Workload w(c, 3);
    w.options.engine = engine();
    w.options.mask_mod =
        parse_expression(mask.text, {tensors.known[0].symbol, tensors.known[1].symbol});
    w.mask_value = mask.value;
    w.forward.tensors = w.backward.tensors = tensors.of({w.options.mask_mod});
    // What is hidden reaches no row.
    const bool by_keys = std::string(mask.text) == "q // 128 == k // 128";
    if (by_keys) {
      std::vector<double> v = read(w.forward.v);
      std::fill_n(v.begin(), 8, std::numeric_limits<double>::quiet_NaN());
      write(w.forward.v, v);
      w.seal();
    }
    if (!runs(w)) continue;
    const Expected e = by_keys ? expect_forward(w) : expect(w);
    EXPECT_TRUE(forward_is_right(w, e));
    if (!by_keys) {
      EXPECT_TRUE(backward_is_right(w, e));
    }
  }
}

// Of no keys or no queries no map is made. Of many rows: CTAs compute several blocks of these.
TEST_P(Expressions, MapsOfNoTiles) {
  for (const auto& [sq, sk] : {std::pair<int64_t, int64_t>{16, 0}, {3000, 0}, {0, 16}}) {
    Case c{.dtype = dtype(), .sq = sq, .sk = sk, .hq = 6, .hk = 2, .d = 64, .dv = 64};
    c.mask = causal();
    SCOPED_TRACE(c.name());
    Workload w(c, 3);
    w.options.engine = engine();
    w.options.mask_mod = parse_expression("(q + k + h) % 3 != 1");
    w.mask_value = [](const ScorePlace& p) { return (p.q + p.k + p.h) % 3 != 1; };
    if (!runs(w)) continue;
    const Expected e = expect(w);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// One head, and so few blocks of rows that there may be more of them than its strips need.
TEST_P(Expressions, DocumentsOfOneHead) {
  constexpr int64_t kTokens = 1000;
  BoundTensors tensors;
  std::mt19937_64 random(1);
  tensors.add("doc", DType::kI32, {1, kTokens}, random);
  std::vector<double> ids(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) ids[i] = static_cast<double>((i + 40) / 230);
  write(tensors.memory[0], ids);
  Case c{.dtype = dtype(), .sq = kTokens, .sk = kTokens, .hq = 1, .hk = 1, .d = 72, .dv = 72};
  Workload w(c, 3);
  w.options.engine = engine();
  w.options.mask_mod = parse_expression("doc[b, q] == doc[b, k]", {tensors.known[0].symbol});
  w.mask_value = [&](const ScorePlace& p) { return ids[p.q] == ids[p.k]; };
  w.forward.tensors = w.backward.tensors = tensors.of({w.options.mask_mod});
  if (!runs(w)) return;
  EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
}

// Masks of any form over several tiles: that a tile is skipped, or not looked at, is never wrong.
TEST_P(Expressions, RandomMasksOfTiles) {
  const uint64_t seed = test_seed();
  for (uint64_t i = 0; i < 3; ++i) {
    Case c{.dtype = dtype(), .batch = 2, .sq = 200, .sk = 330, .hq = 4, .hk = 2, .d = 8, .dv = 8};
    if (i == 0) c.seqused = true;
    if (i == 1) c.layout = Layout::kPacked;
    if (i == 1) c.batch = 1;
    if (i == 2) c.mask = causal();
    std::mt19937_64 random(seed * 10 + i);
    BoundTensors tensors;
    tensors.add("doc", DType::kI32, {2, 330}, random);
    tensors.add("row", DType::kF32, {4, 200}, random);
    std::vector<double> ids(2 * 330);
    for (size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<double>(n % 330 / 70);
    write(tensors.memory[0], ids);
    tensors.known[0].values = ids;
    RandomExpressions make(seed * 10 + i, tensors.known, true);
    Workload w(c, 3 + i);
    w.options.engine = engine();
    const KnownExpr e = make.condition(2 + static_cast<int>(i));
    w.options.mask_mod = e.expr;
    w.mask_value = e.value;
    w.forward.tensors = w.backward.tensors = tensors.of({e.expr});
    SCOPED_TRACE(c.name() + " " + e.expr.text());
    if (!runs(w)) continue;
    const Expected expected = expect(w);
    EXPECT_TRUE(forward_is_right(w, expected));
    EXPECT_TRUE(backward_is_right(w, expected));
  }
}

// What a map skips, and what it takes for whole, changes no bit: the same mask as a tensor of all
// scores, of which no map sees anything, gives the same. In each way in which gradients come in a
// fixed order.
void Expressions::compare_with_all_looked_at(size_t i, uint64_t seed) {
  struct Form {
    int64_t d;
    bool invariant, slope;
    Mask mask = full();
  };
  constexpr int64_t kQueries = 200, kKeys = 330, kHeads = 4, kBatch = 2;
  const Form forms[] = {{8, false, false},
                        {40, true, false},
                        {72, false, false, causal()},
                        {136, false, false},
                        {72, false, true, window(150, 90)}};
  const Form& form = forms[i % std::size(forms)];
  const Case c{.dtype = dtype(),
               .batch = kBatch,
               .sq = kQueries,
               .sk = kKeys,
               .hq = kHeads,
               .hk = 2,
               .d = form.d,
               .dv = form.d,
               .mask = form.mask,
               .seqused = i % 2 == 1};
  std::mt19937_64 random(seed * 10 + i);
  BoundTensors tensors;
  tensors.add("doc", DType::kI32, {kBatch, kKeys}, random);
  tensors.add("shown", DType::kBool, {kBatch, kHeads, kQueries, kKeys}, random);
  std::vector<double> ids(kBatch * kKeys);
  for (size_t n = 0; n < ids.size(); ++n)
    ids[n] = static_cast<double>((n % kKeys + n / kKeys * 30) / 90);
  write(tensors.memory[0], ids);
  tensors.known[0].values = ids;
  const KnownExpr masks[] = {
      RandomExpressions(seed * 10 + i, {tensors.known[0]}, true).condition(2),
      {parse_expression("doc[b, q] == doc[b, k] || k < 20 * h", {tensors.known[0].symbol}),
       [&](const ScorePlace& p) {
         return ids[p.b * kKeys + p.q] == ids[p.b * kKeys + p.k] || p.k < 20 * p.h;
       }},
      {parse_expression("q // 64 != k // 64 && (q // 64 + k // 128 + hk) % 3 != 1"),
       [](const ScorePlace& p) {
         return p.q / 64 != p.k / 64 && (p.q / 64 + p.k / 128 + p.hk) % 3 != 1;
       }},
  };
  // The first mask may depend on sq and sk, which are those of whole sequences here: not with
  // seqused.
  const KnownExpr& mask = c.seqused ? masks[1 + seed % 2] : masks[(seed + i / 2) % 3];
  std::vector<double> shown;
  for (int64_t n = 0; n < kBatch * kHeads * kQueries * kKeys; ++n) {
    ScorePlace p{.b = n / kKeys / kQueries / kHeads, .h = n / kKeys / kQueries % kHeads};
    p.hk = p.h / 2, p.q = n / kKeys % kQueries, p.k = n % kKeys;
    p.sq = kQueries, p.sk = kKeys;
    shown.push_back(mask.value(p));
  }
  write(tensors.memory[1], shown);
  tensors.known[1].values = shown;
  Workload mapped(c, 3 + i), looked_at(c, 3 + i);
  for (Workload* w : {&mapped, &looked_at}) {
    w->options.engine = engine();
    w->options.deterministic = true;
    w->options.invariant = form.invariant;
    if (form.slope) w->options.score_mod = 3 * tanh(score / 3);
    w->options.mask_mod = w == &mapped ? mask.expr : tensors.known[1].symbol(b, h, q, k);
    w->forward.tensors = w->backward.tensors = tensors.of({w->options.mask_mod});
  }
  if (form.slope)
    mapped.score_value = [](const ScorePlace& p) { return 3 * std::tanh(p.score / 3); };
  mapped.mask_value = mask.value;
  SCOPED_TRACE(c.name() + " " + mask.expr.text());
  if (!runs(mapped) || !runs(looked_at)) return;
  const Expected expected = expect(mapped);
  EXPECT_TRUE(forward_is_right(mapped, expected));
  EXPECT_TRUE(backward_is_right(mapped, expected));
  EXPECT_EQ(bits(mapped.forward.out), bits(looked_at.forward.out));
  EXPECT_EQ(bits(mapped.forward.lse), bits(looked_at.forward.lse));
  EXPECT_EQ(bits(mapped.backward.dq), bits(looked_at.backward.dq));
  EXPECT_EQ(bits(mapped.backward.dk), bits(looked_at.backward.dk));
  EXPECT_EQ(bits(mapped.backward.dv), bits(looked_at.backward.dv));
}

TEST_P(Expressions, MapsOfTilesChangeNoBits) {
  for (size_t i = 0; i < 5; ++i) compare_with_all_looked_at(i, test_seed());
}

// One of these, for engines that take long.
TEST_P(Expressions, AMapOfTilesChangesNoBits) {
  compare_with_all_looked_at(test_seed() % 5, test_seed());
}

// Maps whose blocks have more tiles than a warp looks at together, of which few are seen.
TEST_P(Expressions, MapsOfManyTiles) {
  struct Form {
    int64_t sq, sk;
    const char* mask;
    bool (*shows)(int64_t q, int64_t k);
  };
  const Form forms[] = {
      {130, 140000, "k // 50000 == q // 50 && k % 50000 > 49900",
       [](int64_t q, int64_t k) { return k / 50000 == q / 50 && k % 50000 > 49900; }},
      {140000, 25, "q // 50000 == k // 10 && q % 50000 > 49900",
       [](int64_t q, int64_t k) { return q / 50000 == k / 10 && q % 50000 > 49900; }}};
  for (const Form& form : forms) {
    const Case c{.dtype = dtype(), .sq = form.sq, .sk = form.sk, .d = 8, .dv = 8};
    SCOPED_TRACE(c.name());
    Workload w(c, 3);
    w.options.engine = engine();
    w.options.deterministic = true;
    w.options.mask_mod = parse_expression(form.mask);
    w.mask_value = [&](const ScorePlace& p) { return form.shows(p.q, p.k); };
    if (!runs(w)) return;
    const Expected expected = expect(w);
    EXPECT_TRUE(forward_is_right(w, expected));
    EXPECT_TRUE(backward_is_right(w, expected));
  }
}

// On GPUs a kernel of wide heads reads the map by rows, and another one by keys.
TEST_P(Expressions, MapsOfWideHeads) {
  const Case c{.dtype = on_cuda() ? DType::kBF16 : dtype(),
               .batch = 1,
               .sq = 200,
               .sk = 230,
               .hq = 2,
               .hk = 1,
               .d = 320,
               .dv = 264};
  Workload w(c, 3);
  w.options.engine = engine();
  w.options.mask_mod = parse_expression("q // 70 == k // 80 && k % 80 != 3");
  w.mask_value = [](const ScorePlace& p) { return p.q / 70 == p.k / 80 && p.k % 80 != 3; };
  if (!runs(w)) return;
  const Expected expected = expect(w);
  EXPECT_TRUE(forward_is_right(w, expected));
  EXPECT_TRUE(backward_is_right(w, expected));
}

template <class T>
Tensor view(T* data, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(data, kDTypeOf<T>, shape);
}

// Blocks of lists, of each head its own.
TEST_P(Expressions, ListsOfBlocks) {
  constexpr int64_t kRows = 5, kKeys = 6, kHeads = 2, kBlock = 64;
  std::mt19937_64 random(test_seed());
  std::vector<int64_t> offsets;
  std::vector<int32_t> indices;
  for (int64_t list = 0; list < kHeads * (kRows + 1); ++list) {
    offsets.push_back(static_cast<int64_t>(indices.size()));
    for (int32_t key = 0; key < kKeys && list % (kRows + 1) < kRows; ++key)
      if (random() % 3 == 0) indices.push_back(key);
  }
  bool seen[kHeads * kRows * kKeys];
  std::fill(std::begin(seen), std::end(seen), true);
  expand_blocks({view(offsets.data(), {kHeads, kRows + 1}),
                 view(indices.data(), {static_cast<int64_t>(indices.size())})},
                view(seen, {kHeads, kRows, kKeys}));
  BoundTensors tensors;
  tensors.add("blocks", DType::kBool, {kHeads, kRows, kKeys}, random);
  write(tensors.memory[0], std::vector<double>(std::begin(seen), std::end(seen)));
  Case c{.dtype = dtype(), .sq = 300, .sk = 350, .hq = kHeads, .hk = 1, .d = 8, .dv = 8};
  Workload w(c, 3);
  w.options.engine = engine();
  w.options.mask_mod = parse_expression("blocks[h, q // 64, k // 64]", {tensors.known[0].symbol});
  w.mask_value = [&](const ScorePlace& p) {
    const auto list = offsets.begin() + p.h * (kRows + 1) + p.q / kBlock;
    return std::count(indices.begin() + list[0], indices.begin() + list[1], p.k / kBlock) > 0;
  };
  w.forward.tensors = w.backward.tensors = tensors.of({w.options.mask_mod});
  if (!runs(w)) return;
  const Expected e = expect(w);
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
}

TEST(BlockLists, AreRefusedByName) {
  int32_t offsets[] = {0, 2, 3, 5}, indices[] = {0, 3, 1, 0, 2};
  bool blocks[3 * 4];
  const auto error = [&](const ConstTensor& begins, const ConstTensor& numbers, const Tensor& to) {
    std::fill(std::begin(blocks), std::end(blocks), true);
    const std::string message = message_of([&] { expand_blocks({begins, numbers}, to); });
    if (!message.empty()) {  // nothing is written
      EXPECT_EQ(std::count(std::begin(blocks), std::end(blocks), true), 12) << message;
    }
    return message;
  };
  const auto begins = view(offsets, {4});
  const auto numbers = view(indices, {5});
  const auto to = view(blocks, {3, 4});
  EXPECT_EQ(error(begins, numbers, to), "");
  EXPECT_EQ(std::vector<bool>(std::begin(blocks), std::end(blocks)),
            (std::vector<bool>{1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0}));
  float floats[5] = {};
  EXPECT_EQ(error(begins, view(floats, {5}), to), "indices: got f32, want i32 or i64");
  EXPECT_EQ(error(begins, view(indices, {5, 1}), to),
            "indices: got 2 dimensions i32 (5, 1), want 1 (count)");
  EXPECT_EQ(error(begins, numbers, view(blocks, {2, 6})),
            "offsets: got shape (4), want (3) = ([[batch,] heads,] row blocks + 1)");
  EXPECT_EQ(error(begins, numbers, view(blocks, {12})),
            "blocks: got bool (12), want bool ([[batch,] heads,] row blocks, key blocks)");
  EXPECT_EQ(error(begins, numbers, view(offsets, {2, 2})), "blocks: got i32, want bool");
  offsets[3] = 6;
  EXPECT_EQ(error(begins, numbers, to),
            "offsets: got 6 after 3 at 3 of its numbers, want ascending ones up to 5, the indices");
  offsets[3] = 5, offsets[1] = 4;
  EXPECT_EQ(error(begins, numbers, to),
            "offsets: got 3 after 4 at 2 of its numbers, want ascending ones up to 5, the indices");
  offsets[1] = 2, indices[3] = 4;
  EXPECT_EQ(error(begins, numbers, to), "indices: got 4 at 3, want blocks of keys from 0 to 3");
  indices[3] = 2;
  EXPECT_EQ(error(begins, numbers, to),
            "indices: got 2 after 2 at 4, want ascending numbers in a list");
}

// A score that becomes -inf is hidden, whatever its key and value hold.
TEST_P(Expressions, ScoresOfMinusInfinityAreHidden) {
  Case c{.dtype = dtype(), .sq = 20, .sk = 90, .d = 8, .dv = 8};
  Workload w(c, 5);
  w.options.engine = engine();
  const TensorSymbol gate("gate", DType::kF32, 1);
  const Dense gates(DType::kF32, {90});
  std::vector<double> values(90);
  for (size_t k = 5; k < 90; k += 3) values[k] = -kInf;
  write(gates, values);
  w.options.score_mod = score + gate(k);
  w.score_value = [](const ScorePlace& p) { return p.score; };
  w.mask_value = [](const ScorePlace& p) { return p.k < 5 || (p.k - 5) % 3 != 0; };
  w.forward.tensors = w.backward.tensors = {{"gate", gates}};
  std::vector<double> v = read(w.forward.v);
  std::fill_n(v.begin() + 5 * 8, 8, kInf);
  write(w.forward.v, v);
  w.seal();
  if (!runs(w)) return;
  EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
}

// Few queries over caches, whose keys count from the first one that exists: by every path of
// decoding, with -inf of scores at keys whose values are infinite.
TEST_P(Expressions, OverCaches) {
  using Order = CacheShape::Order;
  using Index = CacheShape::Index;
  struct Known {
    int64_t sq, sk, hq, hk, d;
    CacheShape shape;
    bool invariant;
  };
  const Known calls[] = {
      {1, 300, 4, 1, 64, {Order::kNhd, Index::kTable, 16}, false},
      {3, 200, 6, 2, 40, {Order::kHnd, Index::kLists, 24, true}, true},
      {2, 150, 4, 2, 128, {Order::kNhd, Index::kBatch, 0, true}, false},
      {30, 200, 8, 2, 64, {Order::kInterleaved, Index::kTable, 64, true}, false},
  };
  std::mt19937_64 random(test_seed());
  for (size_t i = 0; i < std::size(calls); ++i) {
    const Known& known = calls[i];
    const Case c{.dtype = on_cuda() ? DType::kF16 : dtype(),
                 .batch = 3,
                 .sq = known.sq,
                 .sk = known.sk,
                 .hq = known.hq,
                 .hk = known.hk,
                 .d = known.d,
                 .dv = known.d,
                 .mask = i % 2 == 0 ? causal() : full(),
                 .softcap = i == 2 ? 3.0 : 0.0,
                 .seqused = true,
                 .sinks = i == 1};
    Workload w(c, test_seed() + i);
    w.options.engine = engine();
    w.options.invariant = known.invariant;
    BoundTensors tensors;
    tensors.add("doc", DType::kI32, {3, 400}, random);
    tensors.add("gate", DType::kF32, {8, 400}, random);
    std::vector<double>&ids = tensors.known[0].values, &gates = tensors.known[1].values;
    for (size_t n = 0; n < gates.size(); ++n) {
      if (n % 7 == 1 || n % 400 == 40) gates[n] = -kInf;  // of key 40 for all heads
    }
    write(tensors.memory[1], gates);
    const bool scores = i != 1, masks = i != 0;
    if (scores) {
      w.options.score_mod =
          parse_expression("0.5 * score + gate[h, k] - 0.01 * delta", {tensors.known[1].symbol});
      w.score_value = [&](const ScorePlace& p) {
        return 0.5 * p.score + gates[p.h * 400 + p.k] - 0.01 * (p.k - p.q - (p.sk - p.sq));
      };
      std::vector<double> v = read(w.forward.v);
      std::fill_n(v.begin() + 40 * known.hk * known.d, known.hk * known.d, kInf);
      write(w.forward.v, v);
      w.seal();
    }
    if (masks) {
      w.options.mask_mod =
          parse_expression("doc[b, q] != doc[b, k] || k % 3 == hk", {tensors.known[0].symbol});
    }
    w.mask_value = [&, scores, masks](const ScorePlace& p) {
      if (scores && gates[p.h * 400 + p.k] == -kInf) return false;
      return !masks || ids[p.b * 400 + p.q] != ids[p.b * 400 + p.k] || p.k % 3 == p.hk;
    };
    w.forward.tensors = tensors.of({w.options.score_mod, w.options.mask_mod});
    SCOPED_TRACE(c.name() + " " + known.shape.name());
    const Expected e = expect_forward(w);
    Cached cached(w, known.shape, 2);
    if (!computes([&] { cached.run_forward(); })) continue;
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
    EXPECT_TRUE(cached.check_memory());
  }
}

/// out . dout + lse . dlse after a forward pass.
double loss(Workload& w) {
  w.run_forward();
  double sum = 0;
  const auto add = [&](const ConstTensor& y, const ConstTensor& dy) {
    const std::vector<double> a = read(y), c = read(dy);
    for (size_t n = 0; n < a.size(); ++n) sum += a[n] == -kInf ? 0 : a[n] * c[n];
  };
  add(w.forward.out, w.backward.dout);
  add(w.forward.lse, w.backward.dlse);
  return sum;
}

TEST_P(Expressions, GradientsOfTensors) {
  const TensorSymbol table("table", DType::kF32, 2), gate("gate", DType::kF32, 3);
  const TensorSymbol cap("cap", DType::kF32, 1);
  const Expr mods[] = {
      score + table(h, t5_bucket(delta, 8, 32)),
      score + gate(b, h, q) - gate(b, h, k),
      cap(h) * tanh(score / cap(h)) - table(h, 0) * abs(delta),
      select(q % 3 == 0, score * table(h, k % 8), score),
  };
  for (const Expr& mod : mods) {
    SCOPED_TRACE(mod.text());
    Case c{.dtype = on_cuda() ? DType::kF16 : dtype(),
           .batch = 2,
           .sq = 40,
           .sk = 70,
           .hq = 4,
           .hk = 2,
           .d = &mod == mods ? 264 : 8,  // one of heads that are wide for GPUs
           .dv = &mod == mods ? 300 : 8,
           .mask = causal(),
           .dlse = true,
           .sinks = true};
    Workload w(c, 7);
    w.options.engine = engine();
    w.options.score_mod = mod;
    std::mt19937_64 random(11);
    BoundTensors tensors;
    tensors.add("table", DType::kF32, {4, 8}, random);
    tensors.add("gate", DType::kF32, {2, 4, 70}, random);
    tensors.add("cap", DType::kF32, {4}, random);
    write(tensors.memory[2], std::vector<double>{1.5, 2, 3, 1});
    w.forward.tensors = w.backward.tensors = tensors.of({mod});
    std::deque<Dense> grads;
    for (TensorBinding& t : w.backward.tensors) {
      grads.emplace_back(DType::kF32, std::initializer_list<int64_t>{t.tensor.numel()});
      t.grad = Tensor::contiguous(grads.back().tensor().data, DType::kF32,
                                  std::span(t.tensor.shape).first(t.tensor.rank));
    }
    if (!computes([&] { w.run_forward(); }) || !computes([&] { w.run_backward(); })) continue;
    // The same bits whatever the call asks for.
    std::vector<std::vector<std::byte>> first;
    for (const TensorBinding& t : w.backward.tensors) first.push_back(bits(t.grad));
    w.options.deterministic = true;
    if (computes([&] { w.run_backward(); })) {
      for (size_t n = 0; n < first.size(); ++n)
        EXPECT_EQ(bits(w.backward.tensors[n].grad), first[n]) << w.backward.tensors[n].name;
    }
    w.options.deterministic = false;
    for (size_t n = 0; n < w.forward.tensors.size(); ++n) {
      const ConstTensor& t = w.forward.tensors[n].tensor;
      auto* const data = static_cast<float*>(const_cast<void*>(t.data));
      const std::vector<double> got = read(w.backward.tensors[n].grad);
      if (!precise()) {  // as the reference engine has it, which finite differences test
        Workload exact(c, 7);
        exact.options = w.options;
        exact.options.engine = "reference";
        exact.forward.tensors = w.forward.tensors;
        exact.backward.tensors = w.backward.tensors;
        Dense sums(DType::kF32, {t.numel()});
        for (TensorBinding& other : exact.backward.tensors) other.grad = {};
        exact.backward.tensors[n].grad =
            Tensor::contiguous(sums.tensor().data, DType::kF32, std::span(t.shape).first(t.rank));
        exact.run();
        const std::vector<double> want = read(sums);
        double largest = 0;
        for (const double x : want) largest = std::max(largest, std::fabs(x));
        for (size_t at = 0; at < got.size(); ++at) {
          const double error = on_cuda() ? 4e-3 : 2e-5;  // of D, by the 16 bits of out
          EXPECT_NEAR(got[at], want[at], error * (1 + largest)) << w.forward.tensors[n].name << at;
        }
        continue;
      }
      for (int64_t at = 0; at < t.numel(); at += 1 + t.numel() / 6) {
        const float before = data[at], step = 0x1p-10f;  // exact
        const auto moved = [&](float to) {
          data[at] = to;
          return loss(w);
        };
        const double up = moved(before + step), down = moved(before - step);
        const double up2 = moved(before + 2 * step), down2 = moved(before - 2 * step);
        data[at] = before;
        const double want = (8 * (up - down) - (up2 - down2)) / (12 * step);
        EXPECT_NEAR(got[at], want, 1e-4 * (1 + std::fabs(want)))
            << w.forward.tensors[n].name << " " << at;
      }
    }
  }
}

// Bounds of a mask_mod are those of the mask where these count from the same diagonal.
struct Bounded {
  const char* text;
  bool (*shows)(const ScorePlace& p);
  int64_t sq, sk;
  Layout layout;
  bool seqused;
  Mask mask;                   // which does the same
  const char* rest = nullptr;  // with this mask_mod
};
constexpr Bounded kBounded[] = {
    {"delta <= 0", [](const ScorePlace& p) { return p.k - p.q <= p.sk - p.sq; }, 70, 130,
     Layout::kBshd, false, causal()},
    {"q >= k && q - k < 20", [](const ScorePlace& p) { return p.q >= p.k && p.q - p.k < 20; }, 130,
     130, Layout::kBshd, false, window(19, 0)},
    {"q >= k", [](const ScorePlace& p) { return p.q >= p.k; }, 70, 130, Layout::kBshd, false,
     full(), "q >= k"},
    {"q >= k", [](const ScorePlace& p) { return p.q >= p.k; }, 130, 130, Layout::kPacked, false,
     full(), "q >= k"},
    {"delta <= 0 && delta >= -30",
     [](const ScorePlace& p) {
       const int64_t delta = p.k - p.q - (p.sk - p.sq);
       return delta <= 0 && delta >= -30;
     },
     100, 130, Layout::kPacked, false, window(30, 0)},
    {"abs(delta) <= 9 && k >= 2",
     [](const ScorePlace& p) { return std::abs(p.k - p.q - (p.sk - p.sq)) <= 9 && p.k >= 2; }, 80,
     130, Layout::kBshd, true, window(9, 9), "k >= 2"},
};
Case case_of(const Bounded& b, DType dtype) {
  return {.dtype = dtype,
          .batch = b.layout == Layout::kPacked ? 1 : 2,
          .sq = b.sq,
          .sk = b.sk,
          .hq = 2,
          .hk = 1,
          .d = 16,
          .dv = 16,
          .layout = b.layout,
          .seqused = b.seqused};
}
/// By the expression, and by the mask.
struct BothWays {
  Workload by_expression, by_mask;

  BothWays(const Bounded& b, DType dtype)
      : by_expression(case_of(b, dtype), 5), by_mask(case_of(b, dtype), 5) {
    by_expression.options.mask_mod = parse_expression(b.text);
    by_expression.mask_value = b.shows;
    by_mask.options.mask = b.mask;
    if (b.rest != nullptr) by_mask.options.mask_mod = parse_expression(b.rest);
  }
};

TEST_P(Expressions, BoundsOfDistances) {
  for (const Bounded& one : kBounded) {
    SCOPED_TRACE(one.text);
    BothWays both(one, dtype());
    auto& [by_expression, by_mask] = both;
    by_expression.options.engine = by_mask.options.engine = engine();
    if (!runs(by_expression) || !runs(by_mask)) continue;
    const Expected e = expect(by_expression);
    EXPECT_TRUE(forward_is_right(by_expression, e));
    EXPECT_TRUE(backward_is_right(by_expression, e));
    EXPECT_EQ(bits(by_expression.forward.out), bits(by_mask.forward.out));
    EXPECT_EQ(bits(by_expression.backward.dk), bits(by_mask.backward.dk));
  }
}

FULGUR_EVERY_ENGINE(Expressions);

TEST(ExpressionErrors, NameTheArgument) {
  Case c{.sq = 8, .sk = 8, .d = 8, .dv = 8};
  Workload w(c, 1);
  w.options.engine = "reference";
  const TensorSymbol doc("doc", DType::kI32, 1), table("table", DType::kF32, 1);
  Dense ids(DType::kI32, {8}), floats(DType::kF32, {8}), grad(DType::kF32, {8});
  const auto error = [&](const Expr& score_mod, const Expr& mask_mod,
                         std::vector<TensorBinding> tensors) {
    w.options.score_mod = score_mod;
    w.options.mask_mod = mask_mod;
    w.forward.tensors = w.backward.tensors = std::move(tensors);
    return message_of([&] { w.run_forward(); });
  };
  EXPECT_EQ(error({}, q + k, {}), "mask_mod: got a value of type int, want bool");
  EXPECT_EQ(error(q == k, {}, {}), "score_mod: got a bool, want a number");
  EXPECT_EQ(error({}, score > 0, {}),
            "mask_mod: depends on the score, want places and tensors alone");
  EXPECT_EQ(error({}, doc(q) == doc(k), {}),
            "doc: not given, want the tensor that an expression indexes");
  EXPECT_EQ(error({}, doc(q) == doc(k), {{"doc", floats.tensor()}}),
            "doc: got f32 (8), want i32 of rank 1 as the expression has it");
  EXPECT_EQ(error({}, q == k, {{"doc", ids.tensor()}}),
            "doc: given, but no expression indexes a tensor of that name");
  EXPECT_EQ(error(score + table(q), {}, {{"table", floats.tensor(), grad.tensor()}}),
            "gradient of table: given in the forward pass");
  EXPECT_EQ(error({}, doc(q) == doc(k), {{"doc", ids.tensor()}}), "");
  w.backward.tensors[0].grad = grad.tensor();
  EXPECT_EQ(message_of([&] { w.run_backward(); }),
            "gradient of doc: given, but the elements of the tensor are i32");
}

TEST(ExpressionPlans, OfEqualTermsAreEqual) {
  // A select at the root that hides is a mask, and causal is one that skips tiles.
  Case c{.sq = 8, .sk = 8, .d = 8, .dv = 8};
  Workload by_score(c, 1), by_option(c, 1);
  by_score.options.engine = by_option.options.engine = "reference";
  by_score.options.score_mod = select(delta <= 0, score * 2, -kInf);
  by_option.options.score_mod = score * 2;
  by_option.options.mask = causal();
  by_score.run();
  by_option.run();
  EXPECT_EQ(bits(by_score.forward.out), bits(by_option.forward.out));
  EXPECT_EQ(bits(by_score.backward.dq), bits(by_option.backward.dq));
}

TEST(ExpressionPlans, HaveBoundsInTheMask) {
  for (const Bounded& one : kBounded) {
    SCOPED_TRACE(one.text);
    const BothWays both(one, DType::kF32);
    const auto& [by_expression, by_mask] = both;
    EXPECT_EQ(plan(by_expression.forward, by_expression.options).explain(),
              plan(by_mask.forward, by_mask.options).explain());
    EXPECT_EQ(plan(by_expression.backward, by_expression.options).explain(),
              plan(by_mask.backward, by_mask.options).explain());
  }
}

TEST(ExpressionPlans, SayWhatMasksHideOfTheTiles) {
  const int64_t sq = 300, sk = 500;
  Case c{.batch = 2, .sq = sq, .sk = sk, .hq = 4, .hk = 2, .d = 8, .dv = 8, .mask = causal()};
  Workload w(c, 1);
  const TensorSymbol doc("doc", DType::kI32, 2), width("width", DType::kI32, 1);
  Dense ids(DType::kI32, {2, sk}), widths(DType::kI32, {4});
  std::vector<double> of_keys(2 * sk), of_heads = {9, 40, 500, 130};
  for (int64_t i = 0; i < 2 * sk; ++i)
    of_keys[i] = static_cast<double>(i % sk / (i < sk ? 100 : 33));
  write(ids.tensor(), of_keys);
  write(widths.tensor(), of_heads);
  w.options.mask_mod = doc(b, q + sk - sq) == doc(b, k) || delta > -width(h);
  w.forward.tensors = w.backward.tensors = {{"doc", ids.tensor()}, {"width", widths.tensor()}};
  const std::vector<TensorBinding> tensors = w.forward.tensors;
  for (const Plan& plan :
       {fulgur::plan(w.forward, w.options), fulgur::plan(w.backward, w.options)}) {
    int64_t decided = 0;
    for (int64_t sequence = 0; sequence < 2; ++sequence) {
      for (int64_t head = 0; head < 4; ++head) {
        const TileMap map = plan.tiles(sequence, tensors, head);
        const auto sees = [&](int64_t i, int64_t j) {
          const double* const of = &of_keys[sequence * sk];
          const int64_t from = j - i - (sk - sq);
          return from <= 0 &&
                 (of[i + sk - sq] == of[j] || static_cast<double>(from) > -of_heads[head]);
        };
        for (int64_t n = 0; n < map.rows * map.cols; ++n) {
          const int64_t i0 = n / map.cols * map.Br, j0 = n % map.cols * map.Bc;
          bool any = false, all = true;
          for (int64_t i = i0; i < std::min(sq, i0 + map.Br); ++i) {
            for (int64_t j = j0; j < std::min(sk, j0 + map.Bc); ++j) {
              any = any || sees(i, j);
              all = all && sees(i, j);
            }
          }
          EXPECT_FALSE(map.tiles[n] == Tile::kEmpty && any) << n;
          EXPECT_FALSE(map.tiles[n] == Tile::kFull && !all) << n;
          decided += map.tiles[n] != Tile::kPartial;
        }
      }
    }
    EXPECT_GT(decided, 0);
    const std::string text = plan.explain(tensors);
    EXPECT_TRUE(text.starts_with(plan.explain()));
    EXPECT_NE(text.find("\ntiles     of q head 0: "), std::string::npos) << text;
    EXPECT_EQ(message_of([&] { plan.tiles(0, tensors, 4); }), "h: got 4, want a q head of 4");
    EXPECT_EQ(message_of([&] { plan.tiles(0, {}); }), "tensors: got others than planned");
    std::vector<TensorBinding> empty = tensors;
    empty[0].tensor.data = nullptr;
    EXPECT_EQ(message_of([&] { plan.explain(empty); }), "doc: data is null");
  }
  // Without a mask there is nothing to say.
  w.options.mask_mod = {};
  w.forward.tensors = {};
  const Plan plain = fulgur::plan(w.forward, w.options);
  EXPECT_EQ(plain.explain({}), plain.explain());
  EXPECT_EQ(plain.tiles(1, {}, 2).tiles, plain.tiles(1).tiles);
}

}  // namespace
}  // namespace fulgur::test
