#pragma once

#include "cuda/hopper_forward_plan.h"

namespace fulgur::cuda {

/// Multiprocessor cycles of the tiles of one head.
struct TileCost {
  double mean = 0, longest = 0;
  double leave_part = 0;  ///< to leave one part of a split tile, or to add one up
};

/// Predicts the tiles of a plan whose tile and stages are set: each key tile takes as long as the
/// slowest of tensor cores, softmax, copies, and one warpgroup's own chain of the first two; at the
/// ends of a tile the tensor cores' work overlaps with nothing, where they bind.
TileCost tile_cost(const HopperForwardPlan& plan, const Problem& problem);

/// Predicts a launch of `tiles` tiles, those from `first_split` on cut into `parts`.
double predicted_cycles(const TileCost& cost, int tiles, int first_split, int parts,
                        int multiprocessors);

}  // namespace fulgur::cuda
