#pragma once

#include <string>

namespace fulgur::cpu {

/// Why this process cannot multiply bf16 on the tiles of Intel's AMX, to stand after "AMX: ";
/// empty where it can. The first call asks the system for the tile registers, whose contents make
/// every thread's saved state 8 KB larger.
const std::string& amx_unavailable();

}  // namespace fulgur::cpu
