/// The expressions of a call, in double precision: what they make of a score, what they hide, and
/// the gradients of the tensors that they index.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "expression/call.h"
#include "expression/evaluate.h"

namespace fulgur::reference {

/// The expressions of a pass of a plan.
class PassExpressions {
 public:
  explicit PassExpressions(expression::CallGraph call)
      : call_(std::move(call)),
        score_(call_.graph, call_.score),
        mask_(call_.graph, call_.mask),
        by_score_(call_.graph, call_.by_score) {
    for (const auto& [gather, derivative] : call_.scatters) {
      gathers_.emplace_back(call_.graph, gather);
      derivatives_.emplace_back(call_.graph, derivative);
    }
  }
  PassExpressions(const PassExpressions&) = delete;
  PassExpressions& operator=(const PassExpressions&) = delete;

 private:
  friend class HeadExpressions;

  expression::CallGraph call_;
  expression::Evaluator score_, mask_, by_score_;
  std::vector<expression::Evaluator> gathers_, derivatives_;
};

/// The expressions for the scores of a head. One thread uses it.
class HeadExpressions {
 public:
  /// `place`: of the head; its query and key are set for each score. `gradients`: one for each
  /// tensor of the graph, or none, which are added to where they are not empty.
  HeadExpressions(const PassExpressions& pass, std::span<const ConstTensor> tensors,
                  expression::Place place, std::span<std::vector<double>> gradients)
      : pass_(pass), tensors_(tensors), place_(place), gradients_(gradients) {}

  bool sees(int64_t i, int64_t j) {
    return pass_.call_.mask < 0 || evaluate(pass_.mask_, i, j, 0) != 0;
  }
  /// What a score becomes.
  double score(int64_t i, int64_t j, double S) {
    return pass_.call_.score < 0 ? S : evaluate(pass_.score_, i, j, S);
  }
  /// The derivative of score() by S.
  double derivative(int64_t i, int64_t j, double S) {
    return pass_.call_.by_score < 0 ? 1 : evaluate(pass_.by_score_, i, j, S);
  }
  /// Adds to the gradients of tensors what score (i, j), which was S, gives them with dS.
  void add_gradients(int64_t i, int64_t j, double S, double dS) {
    for (size_t n = 0; n < pass_.gathers_.size(); ++n) {
      const double by_element = evaluate(pass_.derivatives_[n], i, j, S);
      evaluate(pass_.gathers_[n], i, j, S);
      const expression::Node& node = pass_.call_.graph.nodes[pass_.call_.scatters[n].gather];
      double indices[expression::kMaxOperands];
      for (int d = 0; d < node.count; ++d) indices[d] = values_[node.operands[d]];
      const ConstTensor& t = tensors_[node.tensor];
      const int64_t at = expression::element_of(
          ConstTensor::contiguous(nullptr, t.dtype, std::span(t.shape).first(t.rank)), indices);
      if (at >= 0) gradients_[node.tensor][at] += by_element * dS;
    }
  }

 private:
  double evaluate(const expression::Evaluator& what, int64_t i, int64_t j, double S) {
    place_.q = i;
    place_.k = j;
    return what(tensors_, place_, S, values_);
  }

  const PassExpressions& pass_;
  std::span<const ConstTensor> tensors_;
  expression::Place place_;
  std::span<std::vector<double>> gradients_;
  std::vector<double> values_;
};

}  // namespace fulgur::reference
