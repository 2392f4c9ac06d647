#pragma once

#include <array>
#include <cstdint>

#include "call/problem.h"
#include "fulgur/attention.h"
#include "fulgur/scores.h"

namespace fulgur {

constexpr int64_t kMaxDim = 576, kMaxValueDim = 512;  ///< columns of a head of q and k; of v

/// Checks all that a user passes, once for every engine; what only a call knows aside: data, and
/// the values of lengths. Throws Error(kInvalidArgument) that names the argument, what it got and
/// what it wants.
Problem make_problem(const ForwardArgs& args, const Options& options);
Problem make_problem(const BackwardArgs& args, const Options& options);
/// But for the tensor of the scores, which check_scores() looks at.
Problem make_problem(const ScoresArgs& args, const Options& options);

/// The shape that the scores of a call have, and the check that they do.
std::array<int64_t, 4> sizes_of_scores(const ScoresArgs& args, const Problem& problem);
void check_scores(const ScoresArgs& args, const Problem& problem);

/// Checks the bias of a call whose sizes `p` has, or its gradient, and returns where its elements
/// lie.
Problem::Bias checked_bias(const ConstTensor& bias, const Problem& p);
Problem::Bias checked_dbias(const ConstTensor& dbias, const ConstTensor& bias, const Problem& p);

/// The mask that options ask for, checked.
Mask checked_mask(const Options& options);

/// The threads that options ask for, checked.
int checked_threads(const Options& options);

/// Checks that a call says once which random numbers it uses.
void check_random_numbers(const ForwardArgs& args, const Run& run);
void check_random_numbers(const BackwardArgs& args, const Run& run);

}  // namespace fulgur
