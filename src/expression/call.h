/// The expressions of a call, with the tensors that they index.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "expression/graph.h"
#include "fulgur/attention.h"

namespace fulgur::expression {

/// What a pass computes by its expressions.
struct CallGraph {
  /// Where the gradient of a tensor's element is added to.
  struct Scatter {
    int gather, derivative;  ///< nodes: whose element, and the derivative of the score by it
  };

  Graph graph;
  int score = -1, mask = -1;  ///< nodes; -1: none
  int by_score = -1;          ///< backward: the derivative of `score` by the score before it
  std::vector<Scatter> scatters;
};

/// Who gives the tensors of a call, where, and what for.
struct Caller {
  Device device;
  bool backward = false;
};

/// The expressions of a call's options, checked, with the layouts of its tensors: all that a plan
/// knows of them. Those of most calls are not given.
class Expressions {
 public:
  /// The layout of a tensor, or of its gradient.
  struct TensorLayout {
    DType dtype;
    int rank;
    std::array<int64_t, ConstTensor::kMaxRank> shape, strides;

    explicit TensorLayout(const ConstTensor& t)
        : dtype(t.dtype), rank(t.rank), shape(t.shape), strides(t.strides) {}
    bool operator==(const TensorLayout&) const = default;
  };

  Expressions() = default;
  /// Throws Error(kInvalidArgument).
  Expressions(const Options& options, std::span<const TensorBinding> bindings,
              const Caller& caller);

  /// These of other scores: of `score`, an expression of the score that indexes `tensor`, too. No
  /// tensor has its name here.
  Expressions of(const Expr& score, const TensorBinding& tensor) const;

  bool given() const { return parts_ != nullptr; }
  bool changes_scores() const { return given() && parts_->score.given(); }
  bool masks() const { return given() && parts_->mask.given(); }
  /// Whether a gradient of a tensor is wanted.
  bool wants_gradients() const;
  /// As text; empty where it is not given.
  std::string score_text() const { return given() ? parts_->score.text() : ""; }
  std::string mask_text() const { return given() ? parts_->mask.text() : ""; }

  /// For the forward pass, or the backward pass.
  CallGraph graph(bool backward) const;
  /// The layouts of the tensors that the plan is for, in the order of the graph.
  std::span<const TensorLayout> layouts() const;
  /// The layouts of their gradients; those that are not computed have rank 0.
  std::span<const TensorLayout> gradient_layouts() const;
  /// The tensors of a call, in the order of the graph, and where their gradients go.
  std::vector<TensorBinding> bound(std::span<const TensorBinding> bindings) const;

  bool operator==(const Expressions& other) const;
  size_t hash() const;

 private:
  struct Parts {
    Expr score, mask;
    Graph graph;  ///< of both
    std::vector<TensorLayout> tensors, gradients;
  };
  std::shared_ptr<const Parts> parts_;
};

}  // namespace fulgur::expression
