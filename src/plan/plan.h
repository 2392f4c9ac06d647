#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "call/lengths.h"
#include "engine/engine.h"
#include "fulgur/append.h"
#include "fulgur/attention.h"
#include "plan/engines.h"

namespace fulgur {

/// What a Plan holds: the problem, the tensors it was planned for, and the engine's executable.
struct Plan::Impl {
  Problem problem;
  std::variant<ForwardArgs, BackwardArgs> planned;  ///< shapes that run() must meet
  /// The lengths of each sequence, or one that all have; none if the host cannot read them.
  std::optional<std::vector<Sequence>> lengths;
  const Engine* engine = nullptr;
  uint64_t generation = 0;            ///< that of the engine before it planned
  std::vector<std::string> rejected;  ///< engines not chosen, and why
  std::unique_ptr<const Executable> executable;
};

/// Chooses one of `engines` for a problem and lets it plan. `run` is the run of the call that waits
/// for the plan, or null.
template <class Args>
std::shared_ptr<const Plan::Impl> make_plan(Problem problem, const Args& args,
                                            const Options& options, const Run* run,
                                            std::span<const Engine* const> engines = all_engines());

/// Runs a call whose shapes are those of the plan.
template <class Args>
void run_plan(const Plan::Impl& plan, const Args& args, const Run& run);

/// The number of visible scores of all heads and sequences.
double visible_scores(const Problem& problem, const std::vector<Sequence>& lengths);

/// The flops of the products over the visible scores.
double flops(const Problem& problem, const std::vector<Sequence>& lengths);

}  // namespace fulgur
