#pragma once

#include <array>
#include <cstdint>

#include "call/problem.h"
#include "fulgur/attention.h"
#include "fulgur/scores.h"

namespace fulgur {

constexpr int64_t kMaxDim = 576, kMaxValueDim = 512;  ///< head dims of q and k, and of v

/// Checks all that a user passes, once for every engine, except what only a run knows: data
/// pointers and the values of lengths. Throws Error(kInvalidArgument) that names the argument, what
/// it got and what it wants.
Problem make_problem(const ForwardArgs& args, const Options& options);
Problem make_problem(const BackwardArgs& args, const Options& options);
/// Does not check the tensor of the scores: see check_scores().
Problem make_problem(const ScoresArgs& args, const Options& options);

/// The shape that the tensor of the scores must have, and the check of that tensor.
std::array<int64_t, 4> sizes_of_scores(const ScoresArgs& args, const Problem& problem);
void check_scores(const ScoresArgs& args, const Problem& problem);

/// Checks the bias, or its gradient, by the sizes of the problem, and returns its strides.
Problem::Bias checked_bias(const ConstTensor& bias, const Problem& p);
Problem::Bias checked_dbias(const ConstTensor& dbias, const ConstTensor& bias, const Problem& p);

/// Checks the mask of the options, and returns it.
Mask checked_mask(const Options& options);

/// Checks the number of threads of the options, and returns it.
int checked_threads(const Options& options);

/// Checks that rng_state and the run do not both give a call its random numbers.
void check_random_numbers(const ForwardArgs& args, const Run& run);
void check_random_numbers(const BackwardArgs& args, const Run& run);

}  // namespace fulgur
