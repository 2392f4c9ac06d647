#pragma once

#include <string>

namespace fulgur::cpu {

/// Why this process cannot multiply bf16 on the tiles of Intel's AMX, worded to follow "AMX: ";
/// empty if it can. The first call asks the system for the tile registers, which make the saved
/// state of every thread 8 KB larger.
const std::string& amx_unavailable();

}  // namespace fulgur::cpu
