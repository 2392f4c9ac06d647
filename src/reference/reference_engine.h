#pragma once

#include "engine/engine.h"

namespace fulgur::reference {

/// FlashAttention-2 in double precision: computes f64, and any float dtype when asked by name.
const Engine& engine();

}  // namespace fulgur::reference
