#pragma once

#include <memory>

#include "call/append_call.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// Launches the kernel that appends the rows. Throws Error: kUnsupported for calls that it does not
/// compute, kUnavailable without the device.
void append(const AppendCall& call, const Run& run);

/// Loads the kernel of append(). Throws the same errors.
void prepare(const AppendCall& call);

/// append() as a step of a call that attends what it appends. Loads the kernels.
std::unique_ptr<const AppendStep> append_step(const Problem& problem);

}  // namespace fulgur::cuda
