#include "plan/engines.h"

#include <array>

#include "cpu/engine.h"
#include "cuda/engine/cuda_engine.h"
#include "reference/reference_engine.h"

namespace fulgur {

std::span<const Engine* const> all_engines() {
  static const std::array<const Engine*, 3> kEngines = {&cuda::engine(), &cpu::engine(),
                                                        &reference::engine()};
  return kEngines;
}

}  // namespace fulgur
