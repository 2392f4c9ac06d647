#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// All candidates of the families that compute a problem, which tuning measures.
Candidates all_candidates(const Problem& problem, std::span<const Family* const> families,
                          const Card& card, std::vector<std::string>* rejected);

/// The candidates that may be chosen, the fastest first: by their `measured` times if all of them
/// were measured, else by the cost model. These fit max_workspace; if none does, the result is the
/// one with the smallest workspace, which make_plan() rejects. Adds to `reasons` how the first one
/// was chosen, and why not the others. Throws Error(kUnsupported) if there is no candidate.
Candidates ranked(const Problem& problem, std::span<const Family* const> families, const Card& card,
                  std::span<const MeasuredTile> measured, Reasons* reasons);

/// The plan of the first candidate whose kernel the compiler makes without a defect (defect_of).
/// The first of all if there is none, and with `invariant`: which kernels have defects depends on
/// the batch.
std::unique_ptr<const Executable> load_best(const Candidates& candidates, const Problem& problem,
                                            Gpu& gpu, Reasons reasons);

}  // namespace fulgur::cuda
