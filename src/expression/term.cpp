#include "expression/term.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <unordered_map>

#include "base/check.h"

namespace fulgur::expression {
namespace {

constexpr int kMaxDepth = 4096;  // of a derivative, too; what users give has fewer nodes

/// What an operation takes. kSame: operands of one type, all numbers. kLogic: bools, or integers.
enum class Takes : uint8_t { kNothing, kSame, kLogic, kInts, kLiteralDivisor, kFloats, kBools };

struct Row {
  Op op;
  const char* name;
  int operands;
  Takes takes;
};

constexpr Row kRows[] = {
    {Op::kLiteral, "literal", 0, Takes::kNothing},
    {Op::kSymbol, "symbol", 0, Takes::kNothing},
    {Op::kGather, "index", 0, Takes::kNothing},
    {Op::kAdd, "+", 2, Takes::kSame},
    {Op::kSub, "-", 2, Takes::kSame},
    {Op::kMul, "*", 2, Takes::kSame},
    {Op::kDiv, "/", 2, Takes::kFloats},
    {Op::kFloorDiv, "floor_div", 2, Takes::kLiteralDivisor},
    {Op::kMod, "%", 2, Takes::kLiteralDivisor},
    {Op::kMin, "min", 2, Takes::kSame},
    {Op::kMax, "max", 2, Takes::kSame},
    {Op::kPow, "pow", 2, Takes::kFloats},
    {Op::kShiftLeft, "<<", 2, Takes::kInts},
    {Op::kShiftRight, ">>", 2, Takes::kInts},
    {Op::kAnd, "&", 2, Takes::kLogic},
    {Op::kOr, "|", 2, Takes::kLogic},
    {Op::kXor, "^", 2, Takes::kLogic},
    {Op::kEqual, "==", 2, Takes::kSame},
    {Op::kNotEqual, "!=", 2, Takes::kSame},
    {Op::kLess, "<", 2, Takes::kSame},
    {Op::kLessEqual, "<=", 2, Takes::kSame},
    {Op::kNot, "!", 1, Takes::kBools},
    {Op::kNeg, "-", 1, Takes::kSame},
    {Op::kAbs, "abs", 1, Takes::kSame},
    {Op::kFloor, "floor", 1, Takes::kFloats},
    {Op::kExp, "exp", 1, Takes::kFloats},
    {Op::kExp2, "exp2", 1, Takes::kFloats},
    {Op::kLog, "log", 1, Takes::kFloats},
    {Op::kTanh, "tanh", 1, Takes::kFloats},
    {Op::kSqrt, "sqrt", 1, Takes::kFloats},
    {Op::kRsqrt, "rsqrt", 1, Takes::kFloats},
    {Op::kSigmoid, "sigmoid", 1, Takes::kFloats},
    {Op::kSin, "sin", 1, Takes::kFloats},
    {Op::kCos, "cos", 1, Takes::kFloats},
    {Op::kErf, "erf", 1, Takes::kFloats},
    {Op::kToFloat, "to_float", 1, Takes::kSame},
    {Op::kToInt, "to_int", 1, Takes::kFloats},
    {Op::kSelect, "select", 3, Takes::kSame},
};
static_assert(std::size(kRows) == static_cast<size_t>(Op::kCount));

const Row& row_of(Op op) { return kRows[static_cast<size_t>(op)]; }

constexpr const char* kSymbols[] = {"score", "b", "h", "hk", "q", "k", "sq", "sk", "q0", "delta"};
static_assert(std::size(kSymbols) == static_cast<size_t>(Symbol::kCount));

bool compares(Op op) {
  return op == Op::kEqual || op == Op::kNotEqual || op == Op::kLess || op == Op::kLessEqual;
}

Type result_of(Op op, Type operands) {
  if (compares(op)) return Type::kBool;
  if (op == Op::kToFloat) return Type::kFloat;
  if (op == Op::kToInt) return Type::kInt;
  return operands;
}

Expr cast(const Expr& x, Type to) {
  const Type from = type_of(x);
  if (from >= to) return x;
  if (is_literal(x)) return literal(to, x.term()->content.value);
  if (from == Type::kBool) {
    const Expr as_int = make(Op::kSelect, {x, literal(Type::kInt, 1), literal(Type::kInt, 0)});
    return cast(as_int, to);
  }
  return make(Op::kToFloat, {x});
}

Expr term(Content content, std::vector<std::shared_ptr<const Term>> operands,
          std::optional<TensorSymbol> tensor = {}) {
  int depth = 0;
  for (const auto& operand : operands) depth = std::max(depth, operand->depth);
  if (depth >= kMaxDepth) {
    fail("expression", "its operations are nested more than {} deep", kMaxDepth);
  }
  return Expr(std::make_shared<const Term>(
      Term{content, std::move(operands), std::move(tensor), depth + 1}));
}

/// What is left of an operation that does nothing, or one of whose operands decides; else nothing.
Expr simplified(Op op, const std::vector<Expr>& x) {
  const auto both = [&](auto test) { return test(0, 1) ? x[0] : test(1, 0) ? x[1] : Expr(); };
  switch (op) {
    case Op::kAdd:
      return both([&](int, int other) { return is_literal(x[other], 0); });
    case Op::kMul:
      return both([&](int, int other) { return is_literal(x[other], 1); });
    case Op::kSub:
      return is_literal(x[1], 0) ? x[0] : Expr();
    case Op::kDiv:
    case Op::kFloorDiv:
      return is_literal(x[1], 1) ? x[0] : Expr();
    case Op::kAnd:
    case Op::kOr: {
      if (type_of(x[0]) != Type::kBool) return {};
      const double decides = op == Op::kAnd ? 0 : 1;
      return both([&](int self, int other) {
        return is_literal(x[self], decides) || is_literal(x[other], 1 - decides);
      });
    }
    case Op::kNeg:
    case Op::kNot: {
      const Term& inner = *x[0].term();
      return inner.content.op == op ? Expr(inner.operands[0]) : Expr();
    }
    case Op::kSelect:
      if (!is_literal(x[0])) return {};
      return x[0].term()->content.value != 0 ? x[1] : x[2];
    default:
      return {};
  }
}

Expr t5_bucket_of(const Expr& delta, const Expr& buckets, const Expr& max_distance) {
  if (!is_literal(buckets) || !is_literal(max_distance)) {
    fail("t5_bucket", "got buckets and a largest distance that are not literals");
  }
  const double half = std::floor(buckets.term()->content.value / 2), exact = std::floor(half / 2);
  const double farthest = max_distance.term()->content.value;
  if (exact < 1 || farthest <= exact) {
    fail("t5_bucket", "got {} buckets up to {}, want at least 4 and more than a quarter of them",
         buckets.term()->content.value, farthest);
  }
  const Expr n = abs(delta);
  const double per_octave = (half - exact) / std::log(farthest / exact);
  const Expr far =
      to_int(log(max(to_float(n), exact) / exact) * per_octave) + static_cast<int>(exact);
  const Expr bucket = select(n < static_cast<int>(exact), n, min(far, static_cast<int>(half) - 1));
  return select(delta > 0, static_cast<int>(half), 0) + bucket;
}

void check_count(std::string_view operation, size_t got, size_t want) {
  if (got != want) {
    fail("expression", "{}: got {} operands, want {}", operation, got, want);
  }
}

}  // namespace

const char* name_of(Op op) { return row_of(op).name; }
const char* name_of(Symbol symbol) { return kSymbols[static_cast<size_t>(symbol)]; }

const char* name_of(Type type) {
  switch (type) {
    case Type::kBool:
      return "bool";
    case Type::kInt:
      return "int";
    case Type::kFloat:
      break;
  }
  return "float";
}

Type type_of(DType dtype) {
  if (dtype == DType::kBool) return Type::kBool;
  return is_float(dtype) ? Type::kFloat : Type::kInt;
}

double wrapped(double value) { return static_cast<int32_t>(static_cast<int64_t>(value)); }

Expr literal(Type type, double value) {
  if (type == Type::kBool) value = value != 0 ? 1 : 0;
  return term({Op::kLiteral, type, Symbol::kScore, value}, {});
}

double compute(Op op, Type type, const double* x) {
  const bool ints = type == Type::kInt;
  const auto whole = [&](int i) { return static_cast<int64_t>(x[i]); };
  const auto word = [&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(whole(i))); };
  const auto integer = [](int64_t value) -> double { return static_cast<int32_t>(value); };
  const auto bits = [](uint32_t value) -> double { return static_cast<int32_t>(value); };
  switch (op) {
    case Op::kAdd:
      return ints ? integer(whole(0) + whole(1)) : x[0] + x[1];
    case Op::kSub:
      return ints ? integer(whole(0) - whole(1)) : x[0] - x[1];
    case Op::kMul:
      return ints ? integer(whole(0) * whole(1)) : x[0] * x[1];
    case Op::kDiv:
      return x[0] / x[1];
    case Op::kFloorDiv:
      return std::floor(x[0] / x[1]);
    case Op::kMod:
      return x[0] - std::floor(x[0] / x[1]) * x[1];
    case Op::kMin:
      return std::isnan(x[0]) || x[0] < x[1] ? x[0] : x[1];
    case Op::kMax:
      return std::isnan(x[0]) || x[0] > x[1] ? x[0] : x[1];
    case Op::kPow:
      return std::pow(x[0], x[1]);
    case Op::kShiftLeft:
      return bits(word(0) << (word(1) & 31));
    case Op::kShiftRight:
      return integer(static_cast<int32_t>(whole(0)) >> (word(1) & 31));
    case Op::kAnd:
      return bits(word(0) & word(1));
    case Op::kOr:
      return bits(word(0) | word(1));
    case Op::kXor:
      return bits(word(0) ^ word(1));
    case Op::kEqual:
      return x[0] == x[1];
    case Op::kNotEqual:
      return x[0] != x[1];
    case Op::kLess:
      return x[0] < x[1];
    case Op::kLessEqual:
      return x[0] <= x[1];
    case Op::kNot:
      return x[0] == 0;
    case Op::kNeg:
      return ints ? integer(-whole(0)) : -x[0];
    case Op::kAbs:
      return ints ? integer(std::abs(whole(0))) : std::abs(x[0]);
    case Op::kFloor:
      return std::floor(x[0]);
    case Op::kExp:
      return std::exp(x[0]);
    case Op::kExp2:
      return std::exp2(x[0]);
    case Op::kLog:
      return std::log(x[0]);
    case Op::kTanh:
      return std::tanh(x[0]);
    case Op::kSqrt:
      return std::sqrt(x[0]);
    case Op::kRsqrt:
      return 1 / std::sqrt(x[0]);
    case Op::kSigmoid:
      return 1 / (1 + std::exp(-x[0]));
    case Op::kSin:
      return std::sin(x[0]);
    case Op::kCos:
      return std::cos(x[0]);
    case Op::kErf:
      return std::erf(x[0]);
    case Op::kToFloat:
      return x[0];
    case Op::kToInt:  // as vectors convert: what is too large becomes the next integer
      if (std::isnan(x[0])) return 0;
      return std::trunc(std::clamp(x[0], -0x1p31, 0x1p31 - 1));
    case Op::kSelect:
      return x[0] != 0 ? x[1] : x[2];
    case Op::kLiteral:
    case Op::kSymbol:
    case Op::kGather:
    case Op::kCount:
      break;
  }
  return 0;
}

Expr make(Op op, const std::vector<Expr>& operands) {
  const bool select = op == Op::kSelect;
  const Type type = type_of(operands[select ? 1 : 0]);
  if (std::ranges::all_of(operands, [](const Expr& x) { return is_literal(x); })) {
    double values[3];
    std::ranges::transform(operands, values, [](const Expr& x) { return x.term()->content.value; });
    return literal(result_of(op, type), compute(op, type, values));
  }
  if (Expr same = simplified(op, operands); same.given()) return same;
  std::vector<std::shared_ptr<const Term>> terms;
  for (const Expr& x : operands) terms.push_back(x.term());
  return term({op, result_of(op, type)}, std::move(terms));
}

namespace {

Expr with_score(const Expr& e, const Expr& by, std::unordered_map<const Term*, Expr>& done) {
  const Term& term = *e.term();
  if (term.content.op == Op::kSymbol && term.content.symbol == Symbol::kScore) return by;
  if (term.operands.empty()) return e;
  if (const auto at = done.find(&term); at != done.end()) return at->second;
  std::vector<Expr> operands;
  for (const auto& operand : term.operands) operands.push_back(with_score(Expr(operand), by, done));
  const bool gather = term.content.op == Op::kGather;
  return done[&term] = gather ? term.tensor->at(operands) : make(term.content.op, operands);
}

}  // namespace

Expr with_score(const Expr& e, const Expr& by) {
  std::unordered_map<const Term*, Expr> done;
  return with_score(e, by, done);
}

Expr operation(std::string_view name, std::span<const Expr> operands) {
  for (const Expr& x : operands) {
    if (!x.given()) fail("expression", "{}: got an empty Expr for an operand", name);
  }
  const auto x = [&](size_t i) { return operands[i]; };
  const auto count = [&](size_t want) { check_count(name, operands.size(), want); };
  // What other operations make.
  if (name == ">" || name == ">=") {
    count(2);
    const Expr turned[] = {x(1), x(0)};
    return operation(name == ">" ? "<" : "<=", turned);
  }
  if (name == "&&" || name == "||") {
    count(2);
    for (const Expr& one : operands) {
      if (type_of(one) != Type::kBool) {
        fail("expression", "{}: got {}, want bools", name, name_of(type_of(one)));
      }
    }
    return operation(name.substr(1), operands);
  }
  if (name == "clamp") {
    count(3);
    return min(max(x(0), x(1)), x(2));
  }
  if (name == "silu") {
    count(1);
    return x(0) * sigmoid(x(0));
  }
  if (name == "bit") {
    count(2);
    return ((x(0) >> x(1)) & 1) == 1;
  }
  if (name == "t5_bucket") {
    count(3);
    return t5_bucket_of(x(0), x(1), x(2));
  }
  if (name == "//") return operation("floor_div", operands);
  if (name == "-" && operands.size() == 1) {
    return make(Op::kNeg, {cast(x(0), std::max(Type::kInt, type_of(x(0))))});
  }

  const auto* row = std::ranges::find_if(
      kRows, [&](const Row& one) { return one.takes != Takes::kNothing && name == one.name; });
  if (row == std::end(kRows)) fail("expression", "there is no operation \"{}\"", name);
  count(row->operands);
  std::vector<Expr> cast_to(operands.begin(), operands.end());
  const size_t first = row->op == Op::kSelect ? 1 : 0;
  Type type = Type::kBool;
  for (size_t i = first; i < operands.size(); ++i) type = std::max(type, type_of(x(i)));
  const auto got = [&](const char* want) {
    fail("expression", "{}: got {}, want {}", name, name_of(type), want);
  };
  switch (row->takes) {
    case Takes::kSame:
      if (first == 1 && type_of(x(0)) != Type::kBool) {
        fail("expression", "select: got a condition of type {}, want bool", name_of(type_of(x(0))));
      }
      // Bools may be compared for being equal, and chosen.
      if (row->op != Op::kSelect && row->op != Op::kEqual && row->op != Op::kNotEqual) {
        type = std::max(type, Type::kInt);
      }
      if (row->op == Op::kToFloat) type = Type::kFloat;
      break;
    case Takes::kLogic:
      if (type == Type::kFloat) got("bools or integers");
      break;
    case Takes::kInts:
      type = std::max(type, Type::kInt);
      if (type == Type::kFloat) got("integers");
      break;
    case Takes::kLiteralDivisor:
      type = std::max(type, Type::kInt);
      if (type == Type::kFloat) got("integers");
      if (!is_literal(x(1)) || x(1).term()->content.value < 1) {
        fail("expression", "{}: want a divisor that is a literal of at least 1", name);
      }
      break;
    case Takes::kFloats:
      if (row->op == Op::kFloor || row->op == Op::kToInt) {
        if (type != Type::kFloat) return cast(x(0), Type::kInt);
      }
      type = Type::kFloat;
      break;
    case Takes::kBools:
      if (type != Type::kBool) got("bool");
      break;
    case Takes::kNothing:
      break;
  }
  for (size_t i = first; i < cast_to.size(); ++i) cast_to[i] = cast(x(i), type);
  if (row->op == Op::kToFloat) return cast_to[0];
  return make(row->op, cast_to);
}

}  // namespace fulgur::expression

namespace fulgur {

using expression::Content, expression::Op, expression::Symbol, expression::Term, expression::Type;

Expr Expr::boolean(bool value) { return expression::literal(Type::kBool, value ? 1 : 0); }

Expr Expr::integer(int64_t value) {
  if (value < INT32_MIN || value > INT32_MAX) {
    fail("expression", "got the literal {}, want an integer of 32 bits", value);
  }
  return expression::literal(Type::kInt, static_cast<double>(value));
}

Expr Expr::number(double value) { return expression::literal(Type::kFloat, value); }

Expr Expr::symbol(std::string_view name) {
  for (size_t i = 0; i < static_cast<size_t>(Symbol::kCount); ++i) {
    const auto symbol = static_cast<Symbol>(i);
    if (name != expression::name_of(symbol)) continue;
    const Type type = symbol == Symbol::kScore ? Type::kFloat : Type::kInt;
    return Expr(std::make_shared<const Term>(Term{{Op::kSymbol, type, symbol}, {}, {}, 1}));
  }
  fail("expression", "there is no symbol \"{}\", want score, b, h, hk, q, k, sq, sk, q0 or delta",
       name);
}

Expr Expr::apply(std::string_view operation, std::span<const Expr> operands) {
  return expression::operation(operation, operands);
}

TensorSymbol::TensorSymbol(std::string name, DType dtype, int rank)
    : name_(std::move(name)), dtype_(dtype), rank_(rank) {
  const auto begins = [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; };
  const auto goes_on = [&](char c) { return begins(c) || (c >= '0' && c <= '9'); };
  if (name_.empty() || !begins(name_[0]) || !std::ranges::all_of(name_, goes_on)) {
    fail("tensors", "got the name \"{}\", want [a-z_][a-z0-9_]*", name_);
  }
  if (dtype_ > DType::kBool) {
    fail("tensors", "{}: got {}, want f32, bf16, f16, f64, i32, i64 or bool", name_,
         fulgur::name_of(dtype_));
  }
  if (rank_ < 1 || rank_ > ConstTensor::kMaxRank) {
    fail("tensors", "{}: got rank {}, want 1 to {}", name_, rank_, ConstTensor::kMaxRank);
  }
}

Expr TensorSymbol::at(std::span<const Expr> indices) const {
  if (static_cast<int>(indices.size()) != rank_) {
    fail("expression", "{}: got {} indices, want {}", name_, indices.size(), rank_);
  }
  std::vector<std::shared_ptr<const Term>> operands;
  int depth = 0;
  for (const Expr& index : indices) {
    if (!index.given()) fail("expression", "{}: got an empty Expr for an index", name_);
    if (expression::type_of(index) == Type::kFloat) {
      fail("expression", "{}: got an index of type float, want an integer", name_);
    }
    operands.push_back(expression::operation("+", std::vector<Expr>{index, 0}).term());
    depth = std::max(depth, operands.back()->depth);
  }
  return Expr(std::make_shared<const Term>(
      Term{{Op::kGather, expression::type_of(dtype_)}, std::move(operands), *this, depth + 1}));
}

}  // namespace fulgur
