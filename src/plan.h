#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "fulgur/attention.h"
#include "problem.h"

namespace fulgur {

/// What a Plan holds: the problem, the tensors it was planned for, and the engine's program.
struct Plan::Impl {
  Problem problem;
  ForwardArgs forward;    ///< pass forward: shapes that run() must meet
  BackwardArgs backward;  ///< pass backward
  const Engine* engine = nullptr;
  std::vector<std::string> rejected;  ///< engines not chosen, and why
  std::unique_ptr<Executable> executable;
};

/// Visible scores of all heads and sequences.
double visible_scores(const Problem& problem);

/// 2 flops per multiply-add of the products over visible scores: S and O forward; S, dP, dQ, dK and
/// dV backward.
double flops(const Problem& problem);

/// Bytes of all tensors of the pass, each counted once.
double bytes(const Problem& problem);

}  // namespace fulgur
