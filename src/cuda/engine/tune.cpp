#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "call/check_tensors.h"
#include "call/make_problem.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/cuda_engine.h"
#include "cuda/engine/devices.h"
#include "cuda/engine/shape_class.h"
#include "cuda/engine/tuning.h"
#include "fulgur/cuda.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

constexpr int kRounds = 7;
constexpr double kBurstMicroseconds = 20000;  // long enough for the clock to adapt to the load
constexpr double kMaxRuns = 1000;

class Event {
 public:
  Event() { check(driver().cuEventCreate(&event_, 0), "cuEventCreate"); }
  ~Event() { driver().cuEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(CUstream stream) { check(driver().cuEventRecord(event_, stream), "cuEventRecord"); }
  /// Waits for this event.
  double microseconds_since(const Event& earlier) const {
    check(driver().cuEventSynchronize(event_), "measuring a tile");
    float milliseconds = 0;
    check(driver().cuEventElapsedTime(&milliseconds, earlier.event_, event_), "cuEventElapsedTime");
    return 1e3 * milliseconds;
  }

 private:
  CUevent event_ = nullptr;
};

/// Measures the times of plans of a call on its tensors.
class Stopwatch {
 public:
  Stopwatch(Gpu& gpu, const Call& call, const Run& run)
      : call_(call), run_(run), current_(gpu.context()) {}

  /// Microseconds per run in a burst of `runs`, after one run to warm up.
  double burst(const Executable& plan, int runs) const {
    const auto stream = static_cast<CUstream>(run_.stream);
    plan.run(call_, run_);
    Event start, end;
    start.record(stream);
    for (int i = 0; i < runs; ++i) plan.run(call_, run_);
    end.record(stream);
    return end.microseconds_since(start) / runs;
  }

 private:
  Call call_;
  const Run& run_;
  CurrentContext current_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Median microseconds of each plan. Plans are measured alternately, because the device's clock
/// drifts with its load and temperature.
std::vector<double> measure(const Stopwatch& stopwatch,
                            const std::vector<std::unique_ptr<const Executable>>& plans) {
  std::vector<int> runs;
  for (const auto& plan : plans) {
    const double once = std::max(1.0, stopwatch.burst(*plan, 1));
    runs.push_back(static_cast<int>(std::clamp(kBurstMicroseconds / once, 1.0, kMaxRuns)));
  }
  std::vector<std::vector<double>> times(plans.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < plans.size(); ++i) {
      times[i].push_back(stopwatch.burst(*plans[i], runs[i]));
    }
  }
  std::vector<double> medians;
  for (const auto& t : times) medians.push_back(median(t));
  return medians;
}

template <class Args>
Tuned tune_call(const Args& args, const Options& options, const Run& run) {
  const Problem problem = make_problem(args, options);
  if (problem.append.given) {
    fail("append", "given, want none: tiles are those of the attention that follows");
  }
  std::vector<std::string> rejected;
  const Engine* const cuda_engine = &engine();
  choose_engine({&cuda_engine, 1}, problem, cuda_engine->name(), &rejected);
  if (problem.invariant) fail("invariant", "got true, want false: such calls take no tuned tile");
  if (problem.max_workspace != 0) {
    fail("max_workspace", "got {}, want 0: every tile takes the workspace with which it is fastest",
         problem.max_workspace);
  }
  check_memory(args);
  check_random_numbers(args, run);
  if (run.workspace.data != nullptr) {
    fail("workspace", "is given, want none: every tile needs another, which tuning takes itself");
  }
  if (problem.nothing_to_do()) fail("q", "got no row, want some: there is nothing to measure");
  Gpu& gpu = attending_gpu(problem.device.index);
  const auto families = families_of(gpu.target(), problem.algorithm);
  const Candidates all = all_candidates(problem, families, card_of(gpu), &rejected);
  Reasons reasons;
  const TileId predicted = ranked(problem, families, card_of(gpu), {}, &reasons).at(0)->tile;
  Tunings& tunings = Tunings::here();
  if (const std::string why = tunings.folder().unusable(); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }

  std::vector<std::unique_ptr<const Executable>> plans;
  for (const auto& candidate : all) plans.push_back(candidate->executable(gpu, {}));
  const std::vector<double> microseconds = measure(Stopwatch(gpu, &args, run), plans);
  const std::string key = tuning_key(gpu, problem);
  Tuned tuned{{},
              shape_class(problem),
              fmt::format("cuda:{} {}", problem.device.index, gpu.name()),
              tunings.path(key).string()};
  std::vector<MeasuredTile> tiles;
  for (size_t i = 0; i < all.size(); ++i) {
    const TileId& tile = all[i]->tile;
    tiles.push_back({tile, microseconds[i]});
    tuned.tiles.push_back({tile.family, tile.Br, tile.Bc, microseconds[i], tile == predicted});
  }
  std::stable_sort(
      tuned.tiles.begin(), tuned.tiles.end(),
      [](const TileTime& x, const TileTime& y) { return x.microseconds < y.microseconds; });
  tunings.keep(key, std::move(tiles));
  return tuned;
}

}  // namespace

Tuned tune(const ForwardArgs& args, const Options& options, const Run& run) {
  return tune_call(args, options, run);
}
Tuned tune(const BackwardArgs& args, const Options& options, const Run& run) {
  return tune_call(args, options, run);
}

}  // namespace fulgur::cuda
