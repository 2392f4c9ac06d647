/// Expressions at one place, in double precision: for the reference engine, and what the vectors of
/// other engines are tested by.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "expression/graph.h"
#include "fulgur/tensor.h"

namespace fulgur::expression {

/// Where a score is; the value of each symbol but that of the score itself.
struct Place {
  /// In a call. Where that is a part of a larger one, symbols are those of the larger one.
  int64_t b = 0, h = 0, hk = 0, q = 0, k = 0, sq = 0, sk = 0, q0 = 0;
  struct Larger {
    int64_t b = 0, h = 0, hk = 0, q = 0, k = 0;  ///< of it, where the call begins
    int64_t sq = 0, sk = 0;                      ///< rows and keys that the call does not have
  } larger{};

  int64_t of(Symbol symbol) const;
};

/// Where the element of a gather lies, its indices clamped; -1 where the tensor is empty.
int64_t element_of(const ConstTensor& t, std::span<const double> indices);

/// The value of a node, of those of its operands among `values` of all nodes.
double value_of(const Graph& graph, int node, std::span<const ConstTensor> tensors,
                const Place& place, double score, std::span<const double> values);

/// One node of a graph, and what it is made of.
class Evaluator {
 public:
  Evaluator(const Graph& graph, int root);

  /// Fills `values`, one for each node of the graph, up to that of the root, which it returns.
  double operator()(std::span<const ConstTensor> tensors, const Place& place, double score,
                    std::vector<double>& values) const;

 private:
  const Graph& graph_;
  std::vector<int> nodes_;  ///< that the root needs, operands first
};

}  // namespace fulgur::expression
