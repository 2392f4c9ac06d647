#pragma once

#include "call/append_call.h"
#include "kernels/common/append_params.h"

namespace fulgur::cuda {

/// What a kernel that appends is told, but for the lengths. Throws Error(kUnsupported) for more
/// rows than it counts.
AppendParams append_params(const AppendCall& call);

/// Its lengths, which lie on the device.
void set_lengths(const AppendArgs& args, AppendParams& params);

}  // namespace fulgur::cuda
