#include <fmt/format.h>

#include "commands.h"
#include "fulgur/attention.h"
#include "workload/probes.h"

namespace fulgur::app {
namespace {

/// The peaks of the CPU. `bench` relates speeds to them, `explain` computes expected times with
/// them.
void print_peaks() {
  const int threads = bench::all_threads();
  fmt::print(
      "{:<23} f32 FMA {:.3g} GFLOP/s a thread, memory read {:.3g} GB/s in all, measured now\n", "",
      bench::fma_peak(threads, bench::Effort::kBrief) / threads * 1e-9,
      bench::read_bandwidth(threads, bench::Effort::kBrief) * 1e-9);
}

}  // namespace

void add_devices(CLI::App& app) {
  auto* command = app.add_subcommand(
      "devices", "The engines, why one cannot be used here, and the peaks of the CPU");
  command->footer("Example:\n  fulgur devices");
  command->callback([] {
    for (const EngineInfo& engine : engines()) {
      if (engine.unavailable.empty()) {
        fmt::print("{:<10} available    {}\n", engine.name, engine.description);
        if (engine.name == "cpu") print_peaks();
      } else {
        fmt::print("{:<10} unavailable  {}\n", engine.name, engine.unavailable);
      }
    }
  });
}

}  // namespace fulgur::app
