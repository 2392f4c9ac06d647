#pragma once

#include "cuda/decode/decode_plan.h"

namespace fulgur::cuda::decode {

/// Cycles that a plan takes for a problem whose sequences all have sk keys, without those of any
/// launch: until its CTAs know their work tiles, until memory, or the SM with the most keys, has
/// read K and V, between work tiles, and for partial results to be stored and combined.
double decode_cycles(const DecodePlan& plan, const Problem& problem);

/// The same for lengths that are not known before a call runs: the weighted mean for equal lengths,
/// lengths spread evenly, and one long sequence among short ones.
double expected_decode_cycles(const DecodePlan& plan, const Problem& problem);

/// Whether reading K and V takes longer than the products with them.
bool memory_binds(const DecodePlan& plan, const Problem& problem);

}  // namespace fulgur::cuda::decode
