#pragma once

#include <vector>

#include "cuda/sm90/forward_config.h"

namespace fulgur::cuda::sm90 {

/// SM cycles of the row blocks of one head.
struct BlockCost {
  double mean = 0, longest = 0, shortest = 0;
  double leave_split = 0;        ///< to leave one split of a block, or to add one up
  double end = 0, key_tile = 0;  ///< of a block with its key tiles, and of one of these
  std::vector<int> key_tiles{};  ///< of each row block of a head, in the order they are taken
};

/// Predicts the row blocks of a plan whose tile and stages are set: each key tile takes as long as
/// the slowest of tensor cores, softmax, copies, and one warpgroup's own chain of the first two; at
/// the ends of a block the tensor cores' work overlaps with nothing, where they bind.
BlockCost block_cost(const ForwardPlan& plan, const Problem& problem);

/// Cycles in which K and V come from memory once, spread over all SMs: what binds where
/// rows are few.
double reading_cycles(const Problem& problem, const Card& card);

/// Whether all row blocks take about as long.
bool alike(const BlockCost& cost);

/// Predicts a launch of `blocks` row blocks, those from `first_split` on cut into `splits`.
double predicted_cycles(const BlockCost& cost, int blocks, int first_split, int splits, int sms);

/// Predicts a launch of unequal row blocks of `heads` heads, the first `cut` of each in `splits`.
double predicted_cycles_of_splits(const BlockCost& cost, int heads, int cut, int splits, int sms);

}  // namespace fulgur::cuda::sm90
