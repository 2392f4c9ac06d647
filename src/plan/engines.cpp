#include "plan/engines.h"

#include <array>

#include "base/check.h"
#include "base/fork_mutex.h"
#include "cpu/engine.h"
#include "cuda/engine/card_engine.h"
#include "cuda/engine/cards.h"
#include "cuda/engine/cuda_engine.h"
#include "reference/reference_engine.h"

namespace fulgur {

std::span<const Engine* const> all_engines() {
  using Engines = std::array<const Engine*, 3>;
  static constinit MadeOnce<const Engines> made;
  return made.get([] { return Engines{&cuda::engine(), &cpu::engine(), &reference::engine()}; });
}

const Engine& engine_for_card(const std::string& card) {
  return cuda::card_engine(cuda::card_called(card));
}

const Engine& engine_on(Device device, const std::string& name, const char* like) {
  std::string names;
  for (const Engine* engine : all_engines()) {
    if (engine->device() != device.type) continue;
    if (name.empty() || name == engine->name()) return *engine;
    names += (names.empty() ? "" : " or ") + engine->name();
  }
  fail("engine", "got \"{}\", want {}: {} is on {}", name, names, like, name_of(device));
}

}  // namespace fulgur
