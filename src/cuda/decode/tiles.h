#pragma once

#include <vector>

#include "cuda/decode/decode_plan.h"

namespace fulgur::cuda::decode {

/// A plan with a tile whose warp groups have `warps` warps, and `residents` CTAs on an SM.
DecodePlan with_tile(DecodePlan plan, const Problem& problem, const Card& card, int warps,
                     int residents);

/// The tiles that read each key of a kv head once, as plans: of each path the smallest one that has
/// all rows of a kv head, else the largest; on the warp path over pages also with two CTAs on an
/// SM, which hides that lanes wait for page ids. A card that only has the warp path has a tile for
/// any number of rows, which reads each key once for each block of rows.
std::vector<DecodePlan> tiles_of(const DecodePlan& common, const Problem& problem,
                                 const Card& card);

}  // namespace fulgur::cuda::decode
