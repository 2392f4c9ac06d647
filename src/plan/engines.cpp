#include "plan/engines.h"

#include <array>

#include "base/fork_mutex.h"
#include "cpu/engine.h"
#include "cuda/engine/cuda_engine.h"
#include "reference/reference_engine.h"

namespace fulgur {

std::span<const Engine* const> all_engines() {
  using Engines = std::array<const Engine*, 3>;
  static constinit MadeOnce<const Engines> made;
  return made.get([] { return Engines{&cuda::engine(), &cpu::engine(), &reference::engine()}; });
}

}  // namespace fulgur
