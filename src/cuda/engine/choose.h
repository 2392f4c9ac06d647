#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// Every tile of the families that compute a problem: those that may be measured.
Candidates all_candidates(const Problem& problem, std::span<const Family* const> families,
                          const Card& card, std::vector<std::string>* rejected);

/// Those that may be taken, the fastest first: as they were `measured`, where all of them were, or
/// as the cost model predicts. Of those, the ones that max_workspace has room for, or else the one
/// that wants least, which make_plan() refuses; at least one. `reasons` takes how the first was
/// chosen, and why not the others. Throws Error(kUnsupported) where there is none.
Candidates ranked(const Problem& problem, std::span<const Family* const> families, const Card& card,
                  std::span<const MeasuredTile> measured, Reasons* reasons);

/// The plan of the first candidate whose kernel the compiler keeps in registers and in order; of
/// the very first, where that is true of none, and with `invariant`: which kernels spill depends on
/// what a batch is made of.
std::unique_ptr<const Executable> load_best(const Candidates& candidates, const Problem& problem,
                                            Gpu& gpu, Reasons reasons);

}  // namespace fulgur::cuda
