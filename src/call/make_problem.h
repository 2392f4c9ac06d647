#pragma once

#include "call/problem.h"
#include "fulgur/attention.h"

namespace fulgur {

/// Checks all that a user passes, once for every engine; what only a call knows aside: data, and
/// the values of lengths. Throws Error(kInvalidArgument) that names the argument, what it got and
/// what it wants.
Problem make_problem(const ForwardArgs& args, const Options& options);
Problem make_problem(const BackwardArgs& args, const Options& options);

/// The mask that options ask for, checked.
Mask checked_mask(const Options& options);

/// The threads that options ask for, checked.
int checked_threads(const Options& options);

/// Checks that a call says once which random numbers it uses.
void check_random_numbers(const ForwardArgs& args, const Run& run);
void check_random_numbers(const BackwardArgs& args, const Run& run);

}  // namespace fulgur
