#pragma once

#include "fulgur/append.h"
#include "fulgur/attention.h"

namespace fulgur {

/// Makes the plan that forward() and backward() will find, so that such a call may be captured.
void prepare(const ForwardArgs& args, const Options& options);
void prepare(const BackwardArgs& args, const Options& options);
/// Checks shapes and options as append() will, and loads its kernel on a GPU, so that the call may
/// be captured.
void prepare(const AppendArgs& args, const Options& options);

}  // namespace fulgur
