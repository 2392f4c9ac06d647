/// The speed of the CPU engine as Google Benchmark cases, against peaks measured in the same run:
///   attention_bench --benchmark_filter='forward/f32.*threads:1'
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "fulgur/version.h"
#include "workload/probes.h"
#include "workload/workload.h"

namespace fulgur::bench {
namespace {

struct Peaks {
  double flops_1, flops_all, bandwidth;
};

void run(benchmark::State& state, const Case& c, const Peaks& peaks) {
  const Workload workload(c);
  for (auto _ : state) workload.run();
  const auto per_second = [&](double amount, double unit = 1) {
    return benchmark::Counter(amount / unit, benchmark::Counter::kIsIterationInvariantRate);
  };
  if (c.pass == "decode") {
    state.counters["GB/s"] = per_second(c.bytes(), 1e9);
    state.counters["%read"] = per_second(100 * c.bytes(), peaks.bandwidth);
  } else {
    const double peak = c.threads == 1 ? peaks.flops_1 : peaks.flops_all;
    state.counters["GFLOP/s"] = per_second(workload.flops(), 1e9);
    state.counters["%peak"] = per_second(100 * workload.flops(), peak);
  }
}

}  // namespace
}  // namespace fulgur::bench

int main(int argc, char** argv) {
  using namespace fulgur::bench;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const int threads = all_threads();
  const Peaks peaks{fma_peak(1), fma_peak(threads), read_bandwidth(threads)};
  benchmark::AddCustomContext("fulgur", FULGUR_VERSION);
  benchmark::AddCustomContext("simd", simd_target());
  benchmark::AddCustomContext("f32 FMA peak, 1 thread",
                              fmt::format("{:.1f} GFLOP/s", peaks.flops_1 * 1e-9));
  benchmark::AddCustomContext(fmt::format("f32 FMA peak, {} threads", threads),
                              fmt::format("{:.1f} GFLOP/s", peaks.flops_all * 1e-9));
  benchmark::AddCustomContext("memory read", fmt::format("{:.1f} GB/s", peaks.bandwidth * 1e-9));
  std::vector<Case> cases = cpu_grid("standard", threads);
  for (const Case& c : cache_grid(threads)) cases.push_back(c);
  for (const Case& c : cases) {
    benchmark::RegisterBenchmark(c.name().c_str(), run, c, peaks)
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond)
        ->MinTime(0.1)
        ->Repetitions(5)
        ->ReportAggregatesOnly();
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
