#include "expression/graph.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "base/check.h"

namespace fulgur::expression {
namespace {

class Maker {
 public:
  int add(const std::shared_ptr<const Term>& term) {
    if (const auto known = by_term_.find(term.get()); known != by_term_.end()) return known->second;
    Node node{.content = term->content, .count = static_cast<int>(term->operands.size())};
    for (int i = 0; i < node.count; ++i) node.operands[i] = add(term->operands[i]);
    if (term->tensor) node.tensor = tensor(*term->tensor);
    const auto at = std::ranges::find(graph.nodes, node);
    const auto place = static_cast<int>(at - graph.nodes.begin());
    if (at == graph.nodes.end()) graph.nodes.push_back(node);
    by_term_[term.get()] = place;
    return place;
  }

  Graph graph;

 private:
  int tensor(const TensorSymbol& symbol) {
    auto& all = graph.tensors;
    const auto same_name = [&](const TensorSymbol& one) { return one.name() == symbol.name(); };
    const auto at = std::ranges::find_if(all, same_name);
    if (at == all.end()) {
      all.push_back(symbol);
      return static_cast<int>(all.size()) - 1;
    }
    if (*at != symbol) {
      fail("expression", "{}: got {} of rank {} and {} of rank {}, want one tensor of that name",
           symbol.name(), fulgur::name_of(at->dtype()), at->rank(), fulgur::name_of(symbol.dtype()),
           symbol.rank());
    }
    return static_cast<int>(at - all.begin());
  }

  std::unordered_map<const Term*, int> by_term_;
};

/// Its absolute value is no literal.
bool is_least(const Content& c) { return c.type == Type::kInt && c.value == INT32_MIN; }

/// How tightly an operation holds its operands together; functions most.
int precedence(const Node& node) {
  const bool logic = node.type() == Type::kBool;
  switch (node.op()) {
    case Op::kOr:
      return logic ? 1 : 4;
    case Op::kAnd:
      return logic ? 2 : 6;
    case Op::kEqual:
    case Op::kNotEqual:
    case Op::kLess:
    case Op::kLessEqual:
      return 3;
    case Op::kXor:
      return 5;
    case Op::kShiftLeft:
    case Op::kShiftRight:
      return 7;
    case Op::kAdd:
    case Op::kSub:
      return 8;
    case Op::kMul:
    case Op::kDiv:
    case Op::kFloorDiv:
    case Op::kMod:
      return 9;
    case Op::kNot:
    case Op::kNeg:
      return 10;
    case Op::kLiteral:  // a sign in front is an operator
      if (is_least(node.content)) return 8;
      return std::signbit(node.content.value) ? 10 : 11;
    default:
      return 11;
  }
}

std::string literal_text(const Content& c) {
  if (c.type == Type::kBool) return c.value != 0 ? "true" : "false";
  if (is_least(c)) return fmt::format("{} - 1", INT32_MIN + 1);
  if (c.type == Type::kInt) return fmt::format("{}", static_cast<int64_t>(c.value));
  std::string text = fmt::format("{}", c.value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

class Printer {
 public:
  Printer(const Graph& graph, int root)
      : graph_(graph), uses_(graph.nodes.size()), names_(graph.nodes.size()) {
    count(root);
    std::string bindings;
    int number = 0;
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      if (uses_[n] < 2 || graph.nodes[n].count == 0) continue;
      const std::string body = print(static_cast<int>(n), 0);
      std::string name;
      do name = fmt::format("t{}", ++number);
      while (std::ranges::any_of(graph.tensors,
                                 [&](const TensorSymbol& t) { return t.name() == name; }));
      names_[n] = name;
      bindings += fmt::format("{} = {}; ", name, body);
    }
    text = bindings + print(root, 0);
  }

  std::string text;

 private:
  void count(int n) {
    if (uses_[n]++ > 0) return;
    const Node& node = graph_.nodes[n];
    for (int i = 0; i < node.count; ++i) count(node.operands[i]);
  }

  /// In parentheses, where what is around it holds its operands together more tightly.
  std::string print(int n, int around) const {
    if (!names_[n].empty()) return names_[n];
    const Node& node = graph_.nodes[n];
    const int own = precedence(node);
    const std::string text = bare(node, own);
    return own < around ? fmt::format("({})", text) : text;
  }

  std::string list(const Node& node) const {
    std::string text;
    for (int i = 0; i < node.count; ++i) text += (i > 0 ? ", " : "") + print(node.operands[i], 0);
    return text;
  }

  std::string bare(const Node& node, int own) const {
    switch (node.op()) {
      case Op::kLiteral:
        return literal_text(node.content);
      case Op::kSymbol:
        return name_of(node.content.symbol);
      case Op::kGather:
        return fmt::format("{}[{}]", graph_.tensors[node.tensor].name(), list(node));
      default:
        break;
    }
    std::string name = name_of(node.op());
    if (own == 11) return fmt::format("{}({})", name, list(node));
    if (node.count == 1) return name + print(node.operands[0], own + (node.op() == Op::kNeg));
    if (node.op() == Op::kFloorDiv) name = "//";
    if (node.type() == Type::kBool && (node.op() == Op::kAnd || node.op() == Op::kOr)) name += name;
    // Operators of one precedence are read from left to right; of compares there is one.
    return fmt::format("{} {} {}", print(node.operands[0], own + (own == 3)), name,
                       print(node.operands[1], own + 1));
  }

  const Graph& graph_;
  std::vector<int> uses_;
  std::vector<std::string> names_;
};

}  // namespace

Graph make_graph(std::span<const Expr> roots) {
  Maker maker;
  for (const Expr& root : roots) {
    const int node = root.given() ? maker.add(root.term()) : -1;
    maker.graph.roots.push_back(node);
  }
  return maker.graph;
}

Graph checked_graph(std::span<const Expr> roots) {
  Graph graph = make_graph(roots);
  const auto check = [](size_t got, size_t max, const char* what) {
    if (got > max) fail("expression", "got {} {}, want at most {}", got, what, max);
  };
  check(graph.nodes.size(), kMaxNodes, "operations, symbols and literals");
  check(graph.tensors.size(), kMaxTensors, "tensors");
  const auto is_literal = [](const Node& n) { return n.op() == Op::kLiteral; };
  check(std::ranges::count_if(graph.nodes, is_literal), kMaxLiterals, "literals");
  return graph;
}

std::string text_of(const Graph& graph, int root) { return Printer(graph, root).text; }

}  // namespace fulgur::expression

std::string fulgur::Expr::text() const {
  if (!given()) return {};
  const expression::Graph graph = expression::make_graph(std::span(this, 1));
  return expression::text_of(graph, graph.roots[0]);
}
