/// When the nodes of a graph are computed: what is the same in a sequence once, what only the row
/// or only the key decides once for each, and for each score what is left.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "expression/call.h"
#include "expression/evaluate.h"

namespace fulgur::expression {

/// kUniform: of the sequence. kRow: of the query and its heads. kColumn: of the key. kMixed: of
/// both, or of the score.
enum class Stage : uint8_t { kUniform, kRow, kColumn, kMixed };

/// A graph whose nodes are divided so. It has no symbol but b, h, hk, q, k, sq, sk, q0 and score:
/// delta is k - (q + (sk - sq)).
struct StagedGraph {
  explicit StagedGraph(const CallGraph& call);

  CallGraph call;
  std::vector<Stage> stages;                       ///< of each node
  std::vector<int> slots;                          ///< its place among those of its stage
  std::vector<int> uniform, rows, columns, mixed;  ///< the nodes of each stage, operands first
  /// Where the changed score is the score and what does not depend on it, added or subtracted: the
  /// node of that, which may be one more than the call has; else -1.
  int added = -1;
  bool subtracted = false;
  /// The mixed nodes that the mask needs, and those that scores and their derivatives do: of a sum
  /// those of `added`.
  std::vector<int> mask_nodes, score_nodes;

  /// The values of the nodes of a stage at a place, among `values` of all nodes, where those of
  /// `uniform` are.
  void evaluate(std::span<const int> nodes, std::span<const ConstTensor> tensors,
                const Place& place, std::span<double> values) const;

 private:
  void find_added();
};

/// A value as vectors have it: 32 bits of a float or an integer; of a bool all are equal.
int32_t bits_of(Type type, double value);

}  // namespace fulgur::expression
