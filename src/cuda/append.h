#pragma once

#include "append_call.h"

namespace fulgur::cuda {

/// Launches the kernel that writes the rows. Throws Error: kUnsupported for what it does not take,
/// and as planning a call does.
void append(const AppendCall& call, const Run& run);

/// Loads that kernel. Throws Error likewise.
void prepare(const AppendCall& call);

}  // namespace fulgur::cuda
