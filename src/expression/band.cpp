#include "expression/band.h"

#include <algorithm>
#include <optional>
#include <set>

#include "expression/term.h"

namespace fulgur::expression {
namespace {

constexpr int64_t kMaxBound = 1 << 30;  // sums of it and of a distance do not wrap
constexpr int kMaxSumDepth = 8;         // of sums

/// constant + q Q + k K + sq SQ + sk SK
struct Linear {
  int64_t constant = 0, q = 0, k = 0, sq = 0, sk = 0;

  Linear plus(const Linear& x, int64_t times) const {
    return {constant + times * x.constant, q + times * x.q, k + times * x.k, sq + times * x.sq,
            sk + times * x.sk};
  }
};

std::optional<Linear> linear_symbol(Symbol symbol) {
  switch (symbol) {
    case Symbol::kQ:
      return Linear{.q = 1};
    case Symbol::kK:
      return Linear{.k = 1};
    case Symbol::kSq:
      return Linear{.sq = 1};
    case Symbol::kSk:
      return Linear{.sk = 1};
    case Symbol::kDelta:
      return Linear{.q = -1, .k = 1, .sq = 1, .sk = -1};
    default:
      return std::nullopt;
  }
}

std::optional<Linear> linear_of(const Term& term, int depth = kMaxSumDepth) {
  if (term.content.type != Type::kInt || depth == 0) return std::nullopt;
  const auto operand = [&](size_t i) { return linear_of(*term.operands[i], depth - 1); };
  switch (term.content.op) {
    case Op::kLiteral:
      return Linear{.constant = static_cast<int64_t>(term.content.value)};
    case Op::kSymbol:
      return linear_symbol(term.content.symbol);
    case Op::kNeg: {
      const auto x = operand(0);
      if (x) return Linear{}.plus(*x, -1);
      return std::nullopt;
    }
    case Op::kAdd:
    case Op::kSub: {
      const auto x = operand(0), y = operand(1);
      if (x && y) return x->plus(*y, term.content.op == Op::kAdd ? 1 : -1);
      return std::nullopt;
    }
    default:
      return std::nullopt;
  }
}

class Taker {
 public:
  Taker(const Diagonals& diagonals, Mask* band) : diagonals_(diagonals), band_(band) {}

  void take(const std::shared_ptr<const Term>& term) {
    if (!seen_.insert(term.get()).second) return;
    const Content& of = term->content;
    if (of.op == Op::kAnd) {
      for (const auto& operand : term->operands) take(operand);
    } else if (is_bounds(*term)) {
      found = true;
    } else {
      const Expr other(term);
      rest = rest.given() ? rest && other : other;
    }
  }

  Expr rest;
  bool found = false;

 private:
  /// Whether a condition is one of bounds, which are taken then.
  bool is_bounds(const Term& term) {
    const bool negated = term.content.op == Op::kNot;
    const Term& compare = negated ? *term.operands[0] : term;
    const Op op = compare.content.op;
    if (op != Op::kLess && op != Op::kLessEqual) return false;
    const Term &x = *compare.operands[0], &y = *compare.operands[1];
    // x < y is x <= y - 1, and !(x < y) is y <= x.
    const int64_t less = (op == Op::kLess) != negated;
    return negated ? at_most(y, x, less) : at_most(x, y, less);
  }

  /// x <= y - less
  bool at_most(const Term& x, const Term& y, int64_t less) {
    if (x.content.op == Op::kAbs) {
      const auto inner = linear_of(*x.operands[0]), most = linear_of(y);
      if (!inner || !most) return false;
      const Mask before = *band_;
      const Linear room = most->plus({.constant = less}, -1);
      if (not_negative(room.plus(*inner, -1)) && not_negative(room.plus(*inner, 1))) return true;
      *band_ = before;
      return false;
    }
    const auto low = linear_of(x), high = linear_of(y);
    return low && high && not_negative(high->plus(*low, -1).plus({.constant = less}, -1));
  }

  /// A sign times the distance and a constant, which bounds it on one side.
  bool not_negative(const Linear& x) {
    const int64_t sign = x.k;
    if ((sign != 1 && sign != -1) || x.q != -sign) return false;
    const bool bottom_right = x.sk == -sign && x.sq == sign, top_left = x.sk == 0 && x.sq == 0;
    if (!(bottom_right && diagonals_.bottom_right) && !(top_left && diagonals_.top_left))
      return false;
    if (x.constant < 0 || x.constant > kMaxBound) return false;
    int64_t& bound = sign < 0 ? band_->right : band_->left;
    bound = bound < 0 ? x.constant : std::min(bound, x.constant);
    return true;
  }

  Diagonals diagonals_;
  Mask* band_;
  std::set<const Term*> seen_;
};

}  // namespace

Expr take_bounds(const Expr& mask_mod, const Diagonals& diagonals, Mask* band) {
  Taker taker(diagonals, band);
  taker.take(mask_mod.term());
  return taker.found ? taker.rest : mask_mod;
}

}  // namespace fulgur::expression
