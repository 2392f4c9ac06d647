#pragma once

#include "call/append_call.h"

namespace fulgur::host {

/// Reads and checks lengths and tables, then writes the rows. Throws Error(kInvalidArgument).
void append(const AppendCall& call, int threads);

}  // namespace fulgur::host
