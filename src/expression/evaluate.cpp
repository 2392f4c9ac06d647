#include "expression/evaluate.h"

#include <algorithm>

#include "base/convert.h"

namespace fulgur::expression {
int64_t Place::of(Symbol symbol) const {
  switch (symbol) {
    case Symbol::kB:
      return b + larger.b;
    case Symbol::kH:
      return h + larger.h;
    case Symbol::kHk:
      return hk + larger.hk;
    case Symbol::kQ:
      return q + larger.q;
    case Symbol::kK:
      return k + larger.k;
    case Symbol::kSq:
      return sq + larger.sq;
    case Symbol::kSk:
      return sk + larger.sk;
    case Symbol::kQ0:
      return q0;
    case Symbol::kDelta:
      return of(Symbol::kK) - of(Symbol::kQ) - (of(Symbol::kSk) - of(Symbol::kSq));
    case Symbol::kScore:
    case Symbol::kCount:
      break;
  }
  return 0;
}

int64_t element_of(const ConstTensor& t, std::span<const double> indices) {
  int64_t at = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return -1;
    const auto index = static_cast<int64_t>(indices[i]);
    at += std::clamp<int64_t>(index, 0, t.shape[i] - 1) * t.strides[i];
  }
  return at;
}

double value_of(const Graph& graph, int n, std::span<const ConstTensor> tensors, const Place& place,
                double score, std::span<const double> values) {
  const Node& node = graph.nodes[n];
  double operands[kMaxOperands];
  for (int i = 0; i < node.count; ++i) operands[i] = values[node.operands[i]];
  switch (node.op()) {
    case Op::kLiteral:
      return node.content.value;
    case Op::kSymbol:
      if (is_score(node)) return score;
      return wrapped(static_cast<double>(place.of(node.content.symbol)));
    case Op::kGather: {
      const ConstTensor& t = tensors[node.tensor];
      const int64_t at = element_of(t, operands);
      const double value = at < 0 ? 0 : load_element(t.data, t.dtype, at);
      return node.type() == Type::kInt ? wrapped(value) : value;
    }
    default:
      return compute(node.op(), graph.operand_type(node), operands);
  }
}

Evaluator::Evaluator(const Graph& graph, int root) : graph_(graph) {
  std::vector<bool> needed(graph.nodes.size());
  if (root >= 0) needed[root] = true;
  for (int n = root; n >= 0; --n) {
    if (!needed[n]) continue;
    nodes_.push_back(n);
    const Node& node = graph.nodes[n];
    for (int i = 0; i < node.count; ++i) needed[node.operands[i]] = true;
  }
  std::ranges::reverse(nodes_);
}

double Evaluator::operator()(std::span<const ConstTensor> tensors, const Place& place, double score,
                             std::vector<double>& values) const {
  values.resize(graph_.nodes.size());
  for (const int n : nodes_) values[n] = value_of(graph_, n, tensors, place, score, values);
  return nodes_.empty() ? 0 : values[nodes_.back()];
}

}  // namespace fulgur::expression
