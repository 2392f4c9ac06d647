#include "expression/stages.h"

#include <algorithm>
#include <bit>

namespace fulgur::expression {
namespace {

/// Copies a graph, with operations instead of delta.
class Copy {
 public:
  explicit Copy(const CallGraph& from) {
    to.graph.tensors = from.graph.tensors;
    for (const Node& node : from.graph.nodes) places_.push_back(add(node));
    to.score = place(from.score);
    to.mask = place(from.mask);
    to.by_score = place(from.by_score);
    for (const auto& [gather, derivative] : from.scatters) {
      to.scatters.push_back({place(gather), place(derivative)});
    }
  }

  CallGraph to;

 private:
  int place(int node) const { return node < 0 ? node : places_[node]; }

  int push(const Node& node) {
    to.graph.nodes.push_back(node);
    return static_cast<int>(to.graph.nodes.size()) - 1;
  }
  int symbol(Symbol symbol) {
    Node node;
    node.content = {Op::kSymbol, Type::kInt, symbol};
    return push(node);
  }
  int both(Op op, int x, int y) {
    Node node;
    node.content = {op, Type::kInt};
    node.count = 2;
    node.operands = {x, y};
    return push(node);
  }

  int add(Node node) {
    if (node.op() == Op::kSymbol && node.content.symbol == Symbol::kDelta) {
      const int shift = both(Op::kSub, symbol(Symbol::kSk), symbol(Symbol::kSq));
      const int diagonal = both(Op::kAdd, symbol(Symbol::kQ), shift);
      return both(Op::kSub, symbol(Symbol::kK), diagonal);
    }
    for (int i = 0; i < node.count; ++i) node.operands[i] = places_[node.operands[i]];
    return push(node);
  }

  std::vector<int> places_;
};

Stage stage_of(Symbol symbol) {
  switch (symbol) {
    case Symbol::kScore:
    case Symbol::kDelta:
      return Stage::kMixed;
    case Symbol::kH:
    case Symbol::kHk:  // so that a mask's uniform nodes are those of a sequence
    case Symbol::kQ:
      return Stage::kRow;
    case Symbol::kK:
      return Stage::kColumn;
    default:
      return Stage::kUniform;
  }
}

Stage joined(Stage x, Stage y) {
  if (x == y || y == Stage::kUniform) return x;
  return x == Stage::kUniform ? y : Stage::kMixed;
}

}  // namespace

StagedGraph::StagedGraph(const CallGraph& from) : call(Copy(from).to) {
  find_added();
  const std::vector<Node>& nodes = call.graph.nodes;
  for (size_t n = 0; n < nodes.size(); ++n) {
    const Node& node = nodes[n];
    Stage stage = node.op() == Op::kSymbol ? stage_of(node.content.symbol) : Stage::kUniform;
    for (int i = 0; i < node.count; ++i) stage = joined(stage, stages[node.operands[i]]);
    std::vector<int>* const of_stage[] = {&uniform, &rows, &columns, &mixed};
    std::vector<int>& list = *of_stage[static_cast<int>(stage)];
    stages.push_back(stage);
    slots.push_back(static_cast<int>(list.size()));
    list.push_back(static_cast<int>(n));
  }
  const auto needed_by = [&](std::vector<int> roots) {
    std::vector<bool> needed(nodes.size());
    for (const int root : roots) {
      if (root >= 0) needed[root] = true;
    }
    for (int n = static_cast<int>(nodes.size()) - 1; n >= 0; --n) {
      for (int i = 0; needed[n] && i < nodes[n].count; ++i) needed[nodes[n].operands[i]] = true;
    }
    std::vector<int> list;
    std::ranges::copy_if(mixed, std::back_inserter(list), [&](int n) { return needed[n]; });
    return list;
  };
  std::vector<int> of_scores = {added >= 0 ? added : call.score, call.by_score};
  for (const auto& [gather, derivative] : call.scatters) {
    of_scores.push_back(derivative);
    for (int i = 0; i < nodes[gather].count; ++i) of_scores.push_back(nodes[gather].operands[i]);
  }
  mask_nodes = needed_by({call.mask});
  score_nodes = needed_by(of_scores);
}

void StagedGraph::find_added() {
  if (call.score < 0) return;
  std::vector<Node>& nodes = call.graph.nodes;
  std::vector<bool> by_score(nodes.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    by_score[n] = is_score(nodes[n]);
    for (int i = 0; i < nodes[n].count; ++i) {
      if (by_score[nodes[n].operands[i]]) by_score[n] = true;
    }
  }
  // score + a - b + ... is score + (a + ... - b).
  std::vector<int> terms[2];  // added, subtracted
  int n = call.score;
  while (!is_score(nodes[n])) {
    const Node& node = nodes[n];
    if (node.op() != Op::kAdd && node.op() != Op::kSub) return;
    const bool left = by_score[node.operands[0]];
    const int other = node.operands[left ? 1 : 0];
    if (by_score[other] || (node.op() == Op::kSub && !left)) return;
    terms[node.op() == Op::kSub ? 1 : 0].push_back(other);
    n = node.operands[left ? 0 : 1];
  }
  const auto join = [&](Op op, int x, int y) {
    Node node;
    node.content = {op, Type::kFloat};
    node.count = 2;
    node.operands = {x, y};
    nodes.push_back(node);
    return static_cast<int>(nodes.size()) - 1;
  };
  if (n == call.score) return;
  subtracted = terms[0].empty();
  for (const int term : terms[subtracted ? 1 : 0]) {
    added = added < 0 ? term : join(Op::kAdd, added, term);
  }
  if (subtracted) return;
  for (const int term : terms[1]) added = join(Op::kSub, added, term);
}

void StagedGraph::evaluate(std::span<const int> list, std::span<const ConstTensor> tensors,
                           const Place& place, std::span<double> values) const {
  for (const int n : list) {
    values[n] = value_of(call.graph, n, tensors, place, 0, values);
  }
}

int32_t bits_of(Type type, double value) {
  if (type == Type::kFloat) return std::bit_cast<int32_t>(static_cast<float>(value));
  return type == Type::kBool ? -static_cast<int32_t>(value != 0) : static_cast<int32_t>(value);
}

}  // namespace fulgur::expression
