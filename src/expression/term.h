/// Terms: the nodes of expressions, as operators, text and callers of the C API make them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "fulgur/expression.h"

namespace fulgur::expression {

enum class Type : uint8_t { kBool, kInt, kFloat };

/// Every operation. Its row in term.cpp has its name, its operands and its type.
enum class Op : uint8_t {
  kLiteral,
  kSymbol,
  kGather,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kFloorDiv,
  kMod,
  kMin,
  kMax,
  kPow,
  kShiftLeft,
  kShiftRight,
  kAnd,
  kOr,
  kXor,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kNot,
  kNeg,
  kAbs,
  kFloor,
  kExp,
  kExp2,
  kLog,
  kTanh,
  kSqrt,
  kRsqrt,
  kSigmoid,
  kSin,
  kCos,
  kErf,
  kToFloat,
  kToInt,
  kSelect,
  kCount
};

enum class Symbol : uint8_t { kScore, kB, kH, kHk, kQ, kK, kSq, kSk, kQ0, kDelta, kCount };

constexpr int kMaxOperands = 4;

/// What every node is besides its operands.
struct Content {
  Op op = Op::kLiteral;
  Type type = Type::kFloat;
  Symbol symbol = Symbol::kScore;
  double value = 0;  ///< of a literal

  bool operator==(const Content& other) const {
    return op == other.op && type == other.type && symbol == other.symbol &&
           std::bit_cast<uint64_t>(value) == std::bit_cast<uint64_t>(other.value);
  }
};

/// Immutable, and checked when made.
struct Term {
  Content content;
  std::vector<std::shared_ptr<const Term>> operands;
  std::optional<TensorSymbol> tensor;  ///< of a gather
  int depth = 1;                       ///< of terms below, this one among them
};

const char* name_of(Op op);
const char* name_of(Symbol symbol);
const char* name_of(Type type);
/// The type of a tensor's elements in expressions.
Type type_of(DType dtype);

/// A literal of a type; integers wrap.
Expr literal(Type type, double value);
/// An operation on operands that have the types it wants. Literals are computed, and what a 0 or a
/// 1 leaves alone is.
Expr make(Op op, const std::vector<Expr>& operands);
/// The type of what is given.
inline Type type_of(const Expr& e) { return e.term()->content.type; }
inline bool is_literal(const Expr& e) { return e.term()->content.op == Op::kLiteral; }
inline bool is_literal(const Expr& e, double value) {
  return is_literal(e) && e.term()->content.value == value;
}

/// An operation of the language by its name, which casts operands as it needs to.
Expr operation(std::string_view name, std::span<const Expr> operands);

/// An expression in which `by` takes the place of the score.
Expr with_score(const Expr& e, const Expr& by);

/// What an operation makes of values: those of integers and bools are whole numbers.
double compute(Op op, Type operand_type, const double* operands);
/// An integer of 32 bits.
double wrapped(double value);

}  // namespace fulgur::expression
