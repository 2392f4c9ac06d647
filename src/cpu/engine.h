#pragma once

#include "engine/engine.h"

namespace fulgur::cpu {

/// The SIMD engine: f32, bf16 and f16 on the CPU, computed in f32.
const Engine& engine();

}  // namespace fulgur::cpu
