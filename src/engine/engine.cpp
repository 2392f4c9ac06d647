#include "engine/engine.h"

#include <fmt/format.h>

#include "fulgur/error.h"

namespace fulgur {
namespace {

const char* computed_in(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return "forward attention";
    case Pass::kBackward:
      return "backward attention";
    case Pass::kScores:
      break;
  }
  return "scores";
}

}  // namespace

const Engine& choose_engine(std::span<const Engine* const> engines, const Problem& problem,
                            const std::string& name, std::vector<std::string>* rejected) {
  std::string names, reasons;
  bool unavailable = false, known = name.empty();
  const Engine* chosen = nullptr;
  for (const Engine* engine : engines) {
    names += (names.empty() ? "" : ", ") + engine->name();
    if (!name.empty() && engine->name() != name) continue;
    known = true;
    // In this order, so that a problem on the CPU never looks for a GPU.
    std::string why = engine->rejects(problem);
    if (why.empty() && name.empty()) why = engine->only_by_name(problem);
    if (why.empty()) {
      why = engine->unavailable();
      unavailable |= !why.empty();
    }
    if (why.empty() && chosen == nullptr) {
      chosen = engine;
      continue;
    }
    if (why.empty()) why = fmt::format("{} comes first", chosen->name());
    reasons += fmt::format("{}engine {}: {}", reasons.empty() ? "" : "; ", engine->name(), why);
    rejected->push_back(fmt::format("engine {}: {}", engine->name(), why));
  }
  if (!known) {
    throw Error(Status::kInvalidArgument,
                fmt::format("engine: got \"{}\", want one of {}", name, names));
  }
  if (chosen == nullptr) {
    throw Error(
        unavailable ? Status::kUnavailable : Status::kUnsupported,
        fmt::format("no engine computes {} of {} tensors on {}: {}", computed_in(problem.pass),
                    name_of(problem.dtypes.q), name_of(problem.device), reasons));
  }
  return *chosen;
}

}  // namespace fulgur
