#pragma once

#include "cuda/decode/decode_plan.h"

namespace fulgur::cuda::decode {

/// Cycles of an SM that a plan takes for a problem whose sequences all have sk keys, without what
/// any launch takes: until its CTAs know their work, the time in which memory, or the SM with the
/// most keys, reads them, what lies between work tiles, and the time in which splits are left and
/// combined.
double decode_cycles(const DecodePlan& plan, const Problem& problem);

/// The same as far as lengths are known before a call runs: where they may differ, the mean of what
/// equal, evenly drawn and one long length take.
double expected_decode_cycles(const DecodePlan& plan, const Problem& problem);

/// Whether reading K and V takes longer than the products with them.
bool memory_binds(const DecodePlan& plan, const Problem& problem);

}  // namespace fulgur::cuda::decode
