#pragma once

#include <memory>

#include "call/append_call.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// Launches the kernel that writes the rows. Throws Error: kUnsupported for what it does not take,
/// kUnavailable without the device.
void append(const AppendCall& call, const Run& run);

/// Loads that kernel. Throws Error likewise.
void prepare(const AppendCall& call);

/// As part of a call that attends what it appends. Loads the kernels.
std::unique_ptr<const AppendStep> append_step(const Problem& problem);

}  // namespace fulgur::cuda
