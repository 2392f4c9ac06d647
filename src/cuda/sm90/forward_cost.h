#pragma once

#include <vector>

#include "cuda/sm90/forward_plan.h"

namespace fulgur::cuda::sm90 {

/// The SM cycles of the row blocks of one head.
struct BlockCost {
  double mean = 0, longest = 0, shortest = 0;
  double leave_split = 0;        ///< to store the partial result of a split, or to add it
  double split_loop = 1;         ///< factor of whole blocks of a kernel that can split
  double end = 0, key_tile = 0;  ///< of a block with its key tiles, and of one of these
  std::vector<int> key_tiles{};  ///< of each row block of a head, in the order of their computation
};

/// Predicts the row blocks of a plan whose tile and stages are set. A key tile takes as long as the
/// slowest of tensor cores, softmax, copies, and the latency of products and softmax of a
/// warpgroup. If tensor cores are the bottleneck, their work at the ends of a block overlaps with
/// nothing.
BlockCost block_cost(const ForwardPlan& plan, const Problem& problem);

/// Cycles to read K and V from memory once by all SMs, which is the bottleneck of calls with few
/// rows.
double reading_cycles(const Problem& problem, const Card& card);

/// Whether all row blocks take about the same time.
bool alike(const BlockCost& cost);

/// Predicts a launch of `blocks` row blocks, those from `first_split` on cut into `splits`.
double predicted_cycles(const BlockCost& cost, int blocks, int first_split, int splits, int sms);

/// Predicts a launch of alike row blocks of `heads` heads, `whole` of each with all of their strips
/// first, then `shorter` with one strip less.
double predicted_cycles_of_shorter(const BlockCost& cost, int heads, int whole, int shorter,
                                   int sms);

/// Predicts a launch of unequal row blocks of `heads` heads, the first `cut` of each in `splits`.
double predicted_cycles_of_splits(const BlockCost& cost, int heads, int cut, int splits, int sms);

}  // namespace fulgur::cuda::sm90
