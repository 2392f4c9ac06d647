/// A graph: the nodes of one or more expressions, each once, operands in front of what uses them.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "expression/term.h"

namespace fulgur::expression {

constexpr size_t kMaxNodes = 256, kMaxTensors = 8, kMaxLiterals = 32;

struct Node {
  Content content;
  int count = 0;  ///< of operands
  std::array<int, kMaxOperands> operands{};
  int tensor = -1;  ///< of a gather: its place in Graph::tensors

  Op op() const { return content.op; }
  Type type() const { return content.type; }
  bool operator==(const Node&) const = default;
};

inline bool is_score(const Node& node) {
  return node.op() == Op::kSymbol && node.content.symbol == Symbol::kScore;
}

struct Graph {
  std::vector<Node> nodes;
  std::vector<TensorSymbol> tensors;
  std::vector<int> roots;  ///< one for each expression; -1: not given

  Type operand_type(const Node& node) const {
    const bool select = node.op() == Op::kSelect;
    return nodes[node.operands[select ? 1 : 0]].type();
  }
  bool operator==(const Graph&) const = default;
};

/// The graph of expressions, equal terms shared. Throws Error(kInvalidArgument) where two tensors
/// of one name differ.
Graph make_graph(std::span<const Expr> roots);
/// Likewise of what a user gives, which must keep the limits of the language.
Graph checked_graph(std::span<const Expr> roots);

/// A root as text: what is used twice has a name in front of it, "t1 = ...; ".
std::string text_of(const Graph& graph, int root);

}  // namespace fulgur::expression
