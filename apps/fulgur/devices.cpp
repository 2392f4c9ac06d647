#include <fmt/format.h>

#include "commands.h"
#include "fulgur/attention.h"

namespace fulgur::app {

void add_devices(CLI::App& app) {
  auto* command = app.add_subcommand("devices", "The engines, and why one cannot be used here");
  command->footer("Example:\n  fulgur devices");
  command->callback([] {
    for (const EngineInfo& engine : engines()) {
      if (engine.unavailable.empty()) {
        fmt::print("{:<10} available    {}\n", engine.name, engine.description);
      } else {
        fmt::print("{:<10} unavailable  {}\n", engine.name, engine.unavailable);
      }
    }
  });
}

}  // namespace fulgur::app
