// The language of expressions: text, values, derivatives, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engines.h"
#include "expression/band.h"
#include "expression/derivative.h"
#include "expression/evaluate.h"
#include "random_expression.h"
#include "seed.h"

namespace fulgur::test {
namespace {

using namespace symbols;  // NOLINT(google-build-using-namespace)

std::vector<KnownTensor> some_tensors(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<KnownTensor> tensors = {{{"doc", DType::kI32, 2}, {2, 9}, {}},
                                      {{"table", DType::kF64, 1}, {7}, {}},
                                      {{"pair", DType::kF64, 3}, {3, 6, 8}, {}}};
  for (KnownTensor& t : tensors) {
    int64_t count = 1;
    for (const int64_t n : t.shape) count *= n;
    for (int64_t i = 0; i < count; ++i) {
      const bool whole = t.symbol.dtype() == DType::kI32;
      t.values.push_back(whole ? static_cast<double>(random() % 5)
                               : static_cast<double>(random() % 256) / 64 - 2);
    }
  }
  return tensors;
}

/// The tensors as an engine has them.
struct Bound {
  explicit Bound(const std::vector<KnownTensor>& all) : known(all) {
    for (const KnownTensor& t : known) {
      ints.emplace_back(t.values.begin(), t.values.end());
    }
  }
  std::vector<ConstTensor> in_order(const expression::Graph& graph) const {
    std::vector<ConstTensor> tensors;
    for (const TensorSymbol& symbol : graph.tensors) {
      for (size_t i = 0; i < known.size(); ++i) {
        if (known[i].symbol != symbol) continue;
        const bool whole = symbol.dtype() == DType::kI32;
        const void* data =
            whole ? static_cast<const void*>(ints[i].data()) : known[i].values.data();
        tensors.push_back(ConstTensor::contiguous(data, symbol.dtype(), std::span(known[i].shape)));
      }
    }
    return tensors;
  }
  std::vector<KnownTensor> known;
  std::vector<std::vector<int32_t>> ints;
};

double value_of(const Expr& e, const Bound& bound, const ScorePlace& p) {
  const expression::Graph graph = expression::make_graph(std::span(&e, 1));
  std::vector<double> values;
  const expression::Place place{p.b, p.h, p.hk, p.q, p.k, p.sq, p.sk, p.q0};
  return expression::Evaluator(graph, graph.roots[0])(bound.in_order(graph), place, p.score,
                                                      values);
}

ScorePlace random_place(std::mt19937_64& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  ScorePlace p{.b = below(2), .h = below(4), .q = below(10), .k = below(12), .sq = 10, .sk = 12};
  p.hk = p.h / 2;
  p.score = static_cast<double>(below(1000)) / 250 - 2;
  return p;
}

std::vector<TensorSymbol> symbols_of(const std::vector<KnownTensor>& tensors) {
  std::vector<TensorSymbol> all;
  for (const KnownTensor& t : tensors) all.push_back(t.symbol);
  return all;
}

class RandomTerms : public testing::TestWithParam<int> {
 protected:
  uint64_t seed() const { return test_seed() * 1000 + GetParam(); }
};

TEST_P(RandomTerms, HaveTheValuesThatTheOperationsGive) {
  const auto tensors = some_tensors(seed());
  const Bound bound(tensors);
  RandomExpressions make(seed(), tensors, false);
  std::mt19937_64 random(seed());
  for (int n = 0; n < 20; ++n) {
    for (const KnownExpr& e : {make.number(n % 5), make.integer(n % 4), make.condition(n % 4)}) {
      for (int i = 0; i < 10; ++i) {
        const ScorePlace p = random_place(random);
        const double want = e.value(p);
        EXPECT_NEAR(value_of(e.expr, bound, p), want, 1e-9 * (1 + std::fabs(want)))
            << e.expr.text();
      }
    }
  }
}

TEST_P(RandomTerms, AreReadAsTheyArePrinted) {
  const auto tensors = some_tensors(seed());
  RandomExpressions make(seed(), tensors, false);
  for (int n = 0; n < 30; ++n) {
    for (const KnownExpr& e : {make.number(n % 6), make.integer(n % 4), make.condition(n % 5)}) {
      const std::string text = e.expr.text();
      const Expr again = parse_expression(text, symbols_of(tensors));
      EXPECT_EQ(again.text(), text);
      EXPECT_EQ(expression::make_graph(std::span(&again, 1)),
                expression::make_graph(std::span(&e.expr, 1)))
          << text;
    }
  }
}

TEST_P(RandomTerms, HaveTheDerivativesOfFiniteDifferences) {
  auto tensors = some_tensors(seed());
  const Bound bound(tensors);
  std::mt19937_64 random(seed());
  for (int n = 0; n < 12; ++n) {
    const auto make = [&](const std::vector<KnownTensor>& all) {
      return RandomExpressions(seed() + n, all, true).number(1 + n % 4);
    };
    const KnownExpr e = make(tensors);
    const expression::Derivatives d = expression::derivatives(e.expr);
    for (int i = 0; i < 5; ++i) {
      ScorePlace p = random_place(random);
      const double step = 1e-5;
      // Where the function has a kink (max, clamp, abs), the one-sided derivatives differ: not
      // tested.
      const auto near = [&](auto at, double got, const std::string& what) {
        const double before = at(-step), here = at(0), after = at(step);
        const double left = (here - before) / step, right = (after - here) / step;
        if (std::fabs(left - right) > 1e-3 * (1 + std::fabs(left))) return;
        EXPECT_NEAR(got, (left + right) / 2, 1e-3 * (1 + std::fabs(left))) << what;
      };
      const auto by_score = [&](double dx) {
        ScorePlace moved = p;
        moved.score += dx;
        return e.value(moved);
      };
      near(by_score, value_of(d.by_score, bound, p), e.expr.text());
      // Moving all elements of a tensor moves all of its gathers.
      for (const KnownTensor& t : tensors) {
        double sum = 0;
        for (const auto& [gather, derivative] : d.by_gathers) {
          if (*gather.term()->tensor == t.symbol) sum += value_of(derivative, bound, p);
        }
        if (t.symbol.dtype() == DType::kI32) continue;
        const auto by_tensor = [&](double dx) {
          auto moved = tensors;
          for (KnownTensor& one : moved) {
            if (one.symbol != t.symbol) continue;
            for (double& x : one.values) x += dx;
          }
          return make(moved).value(p);
        };
        near(by_tensor, sum, t.symbol.name() + " of " + e.expr.text());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RandomTerms, testing::Range(0, 10));

TEST(Text, IsThatOfC) {
  const std::vector<TensorSymbol> tensors = {{"doc", DType::kI32, 2}, {"slope", DType::kF32, 1}};
  for (const char* text : {
           "doc[b, q] == doc[b, k] && -1024 < delta",
           "score - slope[h] * to_float(abs(delta))",
           "30.0 * tanh(score / 30.0)",
           "t1 = q // 16; t1 * t1 + (k - 3) % 4 < 7 || !(q == k)",
           "select(delta <= 0, score, -inf)",
           "t1 = tanh(score); select(delta <= 0, t1, t1)",
           "(q & 3 | k << 2) >> 1 != sk - (sq - q0)",
           "-score * -2.5e-07 + pow(score, 2.0) - exp2(floor(score))",
           "(q < k) == (h < hk)",
       }) {
    EXPECT_EQ(parse_expression(text, tensors).text(), text);
  }
  EXPECT_EQ(parse_expression("2 * 3 + q - 0", {}).text(), "6 + q");
  EXPECT_EQ(parse_expression("k >= q && true", {}).text(), "q <= k");
  EXPECT_EQ(parse_expression("-2147483647 - 1 + q", {}).text(), "-2147483647 - 1 + q");
  EXPECT_EQ(parse_expression("score + 1", {}).text(), "score + 1.0");
  EXPECT_EQ((1 + t5_bucket(delta, 32, 128)).text(),
            parse_expression("1 + t5_bucket(delta, 32, 128)", {}).text());
}

TEST(Text, ThatMeansNothingIsAnErrorWithItsPlace) {
  const TensorSymbol doc("doc", DType::kI32, 2);
  const auto error = [&](const char* text) {
    return message_of([&] { parse_expression(text, {doc}); });
  };
  EXPECT_EQ(error("q +"),
            "expression: at character 4, got the end, want a number, a name or \"(\"");
  EXPECT_EQ(error("(q + 1"), "expression: at character 7, got the end, want \")\"");
  EXPECT_EQ(error("q k"), "expression: at character 3, got \"k\", want an operator or the end");
  EXPECT_EQ(error("q < k < 3"),
            "expression: at character 7, got \"< 3\", want one compare, or parentheses");
  EXPECT_EQ(error("dac[b, q]"),
            "expression: at character 1, got \"dac[b, q]\", want a tensor that is declared");
  EXPECT_EQ(error("doc[q]"), "expression: doc: got 1 indices, want 2");
  EXPECT_EQ(error("doc[b, score]"), "expression: doc: got an index of type float, want an integer");
  EXPECT_EQ(error("doc + 1"), "expression: doc: got no indices of the tensor");
  EXPECT_EQ(error("scare"),
            "expression: there is no symbol \"scare\", want score, b, h, hk, q, k, sq, sk, q0 or "
            "delta");
  EXPECT_EQ(error("system(q)"), "expression: there is no operation \"system\"");
  EXPECT_EQ(error("tanh(q, k)"), "expression: tanh: got 2 operands, want 1");
  EXPECT_EQ(error("q // k"),
            "expression: floor_div: want a divisor that is a literal of at least 1");
  EXPECT_EQ(error("q % 0"), "expression: %: want a divisor that is a literal of at least 1");
  EXPECT_EQ(error("score & 1"), "expression: &: got float, want bools or integers");
  EXPECT_EQ(error("q && k"), "expression: &&: got int, want bools");
  EXPECT_EQ(error("select(q, 1, 2)"), "expression: select: got a condition of type int, want bool");
  EXPECT_EQ(error("3000000000"),
            "expression: got the literal 3000000000, want an integer of 32 bits");
  EXPECT_EQ(error(std::string(100, '(').c_str()), "expression: is nested more than 64 deep");
  EXPECT_EQ(error("a = 1; a = 2; a"), "expression: the name \"a\" is given twice");
}

TEST(Terms, OfManyOperationsOrNamesAreRefusedByNumber) {
  using expression::checked_graph;
  const auto error = [](const Expr& e) {
    return message_of([&] { checked_graph(std::span(&e, 1)); });
  };
  Expr sum = score;
  for (int i = 0; i < 33; ++i) sum = sum + score * (i + 0.5);
  EXPECT_EQ(error(sum), "expression: got 33 literals, want at most 32");
  sum = score;
  for (int i = 0; i < 256; ++i) sum = tanh(sum);
  EXPECT_EQ(error(sum), "expression: got 257 operations, symbols and literals, want at most 256");
  sum = score;
  for (int i = 0; i < 9; ++i) sum = sum + TensorSymbol("t" + std::to_string(i), DType::kF32, 1)(q);
  EXPECT_EQ(error(sum), "expression: got 9 tensors, want at most 8");
  EXPECT_EQ(error(TensorSymbol("t", DType::kF32, 1)(q) + TensorSymbol("t", DType::kF16, 1)(q)),
            "expression: t: got f32 of rank 1 and f16 of rank 1, want one tensor of that name");
  EXPECT_EQ(message_of([] { TensorSymbol("T", DType::kF32, 1); }),
            "tensors: got the name \"T\", want [a-z_][a-z0-9_]*");
  EXPECT_EQ(message_of([] { TensorSymbol("t", DType::kU8, 1); }),
            "tensors: t: got u8, want f32, bf16, f16, f64, i32, i64 or bool");
  EXPECT_EQ(message_of([] { Expr() + 1; }), "expression: +: got an empty Expr for an operand");
}

// What a mask says of the distance alone becomes bounds, where those may count from there.
TEST(Bounds, AreTakenFromConjunctions) {
  constexpr expression::Diagonals kDelta{true, false}, kDifference{false, true}, kSame{true, true};
  struct Known {
    const char* mask;
    expression::Diagonals diagonals;
    Mask band;
    const char* rest;
  };
  const Known all[] = {
      {"delta <= 0", kDelta, causal(), ""},
      {"delta <= 0", kDifference, full(), "delta <= 0"},
      {"q >= k", kDifference, causal(), ""},
      {"q >= k", kDelta, full(), "k <= q"},
      {"!(k > q)", kSame, causal(), ""},
      {"!(k > q && k > 3)", kSame, full(), "!(q < k && 3 < k)"},
      {"k <= q + sk - sq", kDelta, causal(), ""},
      {"k <= q + sk - sq", kDifference, full(), "k <= q + sk - sq"},
      {"0 <= -delta && delta > -1024", kDelta, window(1023, 0), ""},
      {"q >= k && q - k < 1024", kDifference, window(1023, 0), ""},
      {"abs(delta) <= 5", kDelta, window(5, 5), ""},
      {"abs(2 + k - q) < 5", kSame, window(6, 2), ""},
      {"delta <= 7 && delta < 3 && delta >= -2 && -4 <= delta", kDelta, window(2, 2), ""},
      {"k < 9 && (k < 4 || delta > 0) && delta <= 0", kDelta, causal(),
       "k < 9 && (k < 4 || 0 < delta)"},
      {"delta <= 0 && delta <= 0", kDelta, causal(), ""},
      // What bounds of a mask cannot say, and what is none.
      {"delta < 0", kSame, full(), "delta < 0"},
      {"delta >= 3", kSame, full(), "3 <= delta"},
      {"abs(delta - 6) <= 5", kSame, full(), "abs(delta - 6) <= 5"},
      {"delta <= 0 || k < 4", kSame, full(), "delta <= 0 || k < 4"},
      {"2 * k <= q + k", kSame, full(), "2 * k <= q + k"},
      {"k + k <= q + q", kSame, full(), "k + k <= q + q"},
      {"k <= q + sk", kSame, full(), "k <= q + sk"},
      {"k < 100", kSame, full(), "k < 100"},
      {"delta <= 2000000000", kSame, full(), "delta <= 2000000000"},
      {"delta * 1.5 <= 0", kSame, full(), "to_float(delta) * 1.5 <= 0.0"},
  };
  for (const Known& one : all) {
    SCOPED_TRACE(one.mask);
    Mask band = full();
    EXPECT_EQ(take_bounds(parse_expression(one.mask), one.diagonals, &band).text(), one.rest);
    EXPECT_EQ(band, one.band);
  }
  // Of two bounds the nearer one stays; chunks stay.
  Mask band = chunked(64, window(10, 3));
  take_bounds(parse_expression("abs(delta) <= 5"), kDelta, &band);
  EXPECT_EQ(band, chunked(64, window(5, 3)));
  // Terms that are used again and again.
  Expr doubled = q + 1;
  for (int i = 0; i < 50; ++i) doubled = doubled + doubled;
  Expr mask = k < doubled;
  for (int i = 0; i < 10; ++i) mask = mask && (mask || b == 0);
  const std::string text = mask.text();
  EXPECT_EQ(take_bounds(mask, kDelta, &band).text(), text);
}

TEST(Derivatives, OfABranchThatIsNotTakenReachNobody) {
  const Bound none({});
  const Expr e = select(score > 0.0, log(score), 0.0);
  const expression::Derivatives d = expression::derivatives(e);
  EXPECT_EQ(value_of(d.by_score, none, {.score = 0}), 0);
  EXPECT_EQ(value_of(d.by_score, none, {.score = 4}), 0.25);
}

TEST(Derivatives, AtTiesAreHalves) {
  const Bound none({});
  EXPECT_EQ(value_of(expression::derivatives(max(score, 1.0)).by_score, none, {.score = 1}), 0.5);
  EXPECT_EQ(value_of(expression::derivatives(abs(score)).by_score, none, {.score = 0}), 0);
}

}  // namespace
}  // namespace fulgur::test
