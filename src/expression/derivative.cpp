#include "expression/derivative.h"

#include <algorithm>
#include <limits>
#include <numbers>

namespace fulgur::expression {
namespace {

/// A term for each node of a graph, equal ones shared.
std::vector<Expr> terms_of(const Graph& graph) {
  std::vector<Expr> terms;
  for (const Node& node : graph.nodes) {
    Term term;
    term.content = node.content;
    for (int i = 0; i < node.count; ++i) {
      term.operands.push_back(terms[node.operands[i]].term());
      term.depth = std::max(term.depth, term.operands.back()->depth + 1);
    }
    if (node.tensor >= 0) term.tensor = graph.tensors[node.tensor];
    terms.emplace_back(std::make_shared<const Term>(std::move(term)));
  }
  return terms;
}

/// What flows back to a term.
struct Adjoint {
  Expr value;              ///< not given: 0
  bool by_branch = false;  ///< it is 0 where a select takes another branch

  Adjoint times(const Expr& factor) const {
    const Expr product = value * factor;
    if (!by_branch || is_literal(factor)) return {product, by_branch};
    // There the factor may be infinite, or no number.
    return {select(value == 0.0, 0.0, product), true};
  }
};

class Reverse {
 public:
  explicit Reverse(const Expr& of)
      : graph_(make_graph(std::span(&of, 1))), terms_(terms_of(graph_)), adjoints_(terms_.size()) {
    adjoints_[graph_.roots[0]] = {1.0};
    all.by_score = 0.0;
    for (size_t n = terms_.size(); n-- > 0;) {
      if (adjoints_[n].value.given()) flow(graph_.nodes[n], terms_[n], adjoints_[n]);
    }
  }

  Derivatives all;

 private:
  void add(int node, const Adjoint& part) {
    if (graph_.nodes[node].type() != Type::kFloat) return;
    Adjoint& sum = adjoints_[node];
    sum.value = sum.value.given() ? sum.value + part.value : part.value;
    sum.by_branch = sum.by_branch || part.by_branch;
  }

  void flow(const Node& node, const Expr& y, const Adjoint& dy) {
    if (node.type() != Type::kFloat) return;
    const auto in = [&](int i) { return terms_[node.operands[i]]; };
    const auto give = [&](int i, const Expr& factor) { add(node.operands[i], dy.times(factor)); };
    switch (node.op()) {
      case Op::kSymbol:
        all.by_score = dy.value;
        return;
      case Op::kGather:
        all.by_gathers.push_back({y, dy.value});
        return;
      case Op::kAdd:
        give(0, 1.0);
        return give(1, 1.0);
      case Op::kSub:
        give(0, 1.0);
        return give(1, -1.0);
      case Op::kMul:
        give(0, in(1));
        return give(1, in(0));
      case Op::kDiv:
        give(0, 1.0 / in(1));
        return give(1, -y / in(1));
      case Op::kMin:
      case Op::kMax: {
        const Expr x = node.op() == Op::kMin ? in(0) : in(1),
                   z = node.op() == Op::kMin ? in(1) : in(0);
        const Expr first = select(in(0) == in(1), 0.5, select(x < z, 1.0, 0.0));
        give(0, first);
        return give(1, 1.0 - first);
      }
      case Op::kPow:
        give(0, in(1) * pow(in(0), in(1) - 1.0));
        // By the exponent it is 0 at a base of 0, as that of PyTorch.
        if (is_literal(in(1))) return;
        return give(1, select(in(0) == 0.0, 0.0, y * log(in(0))));
      case Op::kNeg:
        return give(0, -1.0);
      case Op::kAbs:
        return give(0, select(in(0) == 0.0, 0.0, select(in(0) < 0.0, -1.0, 1.0)));
      case Op::kExp:
        return give(0, y);
      case Op::kExp2:
        return give(0, y * std::numbers::ln2);
      case Op::kLog:
        return give(0, 1.0 / in(0));
      case Op::kTanh:
        return give(0, 1.0 - y * y);
      case Op::kSqrt:
        return give(0, 0.5 / y);
      case Op::kRsqrt:
        return give(0, -0.5 * y / in(0));
      case Op::kSigmoid:
        return give(0, y * (1.0 - y));
      case Op::kSin:
        return give(0, cos(in(0)));
      case Op::kCos:
        return give(0, -sin(in(0)));
      case Op::kErf:
        return give(0, 2 * std::numbers::inv_sqrtpi * exp(-(in(0) * in(0))));
      case Op::kSelect:
        add(node.operands[1], {select(in(0), dy.value, 0.0), true});
        return add(node.operands[2], {select(in(0), 0.0, dy.value), true});
      default:  // literals, casts of integers, floor: steps
        return;
    }
  }

  Graph graph_;
  std::vector<Expr> terms_;
  std::vector<Adjoint> adjoints_;
};

bool depends_on_score(const Expr& e) {
  const Graph graph = make_graph(std::span(&e, 1));
  return std::ranges::any_of(graph.nodes, is_score);
}

}  // namespace

Derivatives derivatives(const Expr& of) { return Reverse(of).all; }

Split split_mask(const Expr& score) {
  Split split{score, {}};
  while (split.score.given() && split.score.term()->content.op == Op::kSelect) {
    const auto& operands = split.score.term()->operands;
    const Expr condition(operands[0]), x(operands[1]), otherwise(operands[2]);
    const double hidden = -std::numeric_limits<double>::infinity();
    const bool keeps = is_literal(otherwise, hidden);
    if ((!keeps && !is_literal(x, hidden)) || depends_on_score(condition)) break;
    const Expr shown = keeps ? condition : !condition;
    split.mask = split.mask.given() ? split.mask && shown : shown;
    split.score = keeps ? x : otherwise;
  }
  return split;
}

}  // namespace fulgur::expression
