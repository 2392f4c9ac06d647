// Tuning measures the tiles of a call, and later plans take the fastest one.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "calls.h"
#include "cuda/device/gpu.h"
#include "cuda/engine/shape_class.h"
#include "cuda/engine/tuning.h"
#include "cuda/sm90/forward_candidates.h"
#include "fulgur/cuda.h"
#include "fulgur/version.h"
#include "on_fake_gpu.h"
#include "rejected.h"

namespace fulgur::test {

namespace sm90 = cuda::sm90;
namespace {

/// A process of its own, whose cache folder no other test looks into.
class Tune : public OnFakeGpu {
 protected:
  static void SetUpTestSuite() {  // what earlier runs of this program kept
    for (const std::filesystem::path& file : kept()) std::filesystem::remove(file);
  }
  void TearDown() override {
    if (state_ != nullptr) state_->fast_block = 0;
  }
  static std::vector<std::filesystem::path> kept() {
    std::vector<std::filesystem::path> files;
    std::error_code none;
    for (const auto& entry :
         std::filesystem::directory_iterator(cuda::CacheFolder::standard().path(), none)) {
      if (entry.path().extension() == ".tuning") files.push_back(entry.path());
    }
    return files;
  }
  static cuda::Tuned tune(const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    return cuda::tune(placed(call.args, kBase), call.options);
  }
  static Details details(const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    return fulgur::plan(call.args, call.options).details();
  }
  static bool tuned(const Details& plan) { return plan.get<std::string>("tile_from") == "tuning"; }
  using Tile = std::pair<unsigned, unsigned>;  // Br and Bc
  Tile tile(size_t launch) const {
    if (state_->launches.at(launch).kernel == std::string("fulgur_decode")) return {};
    return {(state_->launches.at(launch).block / 128 - 1) * 64, k_map(launch).box[1]};
  }
  /// The tile of the kernel that a plan launches.
  Tile launched(const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    fulgur::forward(placed(call.args, kBase), call.options);
    return tile(state_->launches.size() - 1);
  }
};

std::vector<cuda::Fitting<sm90::ForwardPlan>> tiles_of(const ForwardShape& shape) {
  std::vector<std::string> rejected;
  return sm90::forward_candidates(forward_problem(shape), {}, &rejected);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(Tune, PlansTakeTheTileThatWasFastest) {
  const ForwardShape shape{.sq = 2048, .sk = 2048};
  const Tile predicted = launched(shape);
  EXPECT_FALSE(tuned(details(shape)));
  const auto all = tiles_of(shape);
  ASSERT_GE(all.size(), 3u);
  for (const auto& [winner, cycles, tuned_only] : all) {
    const Tile fastest(winner.block_rows(), winner.block_keys);
    state_->fast_block = static_cast<unsigned>(winner.threads());
    state_->fast_keys = fastest.second;
    const cuda::Tuned tuned = tune(shape);
    EXPECT_EQ(tuned.shape_class, cuda::shape_class(forward_problem(shape)));
    EXPECT_EQ(tuned.device, "cuda:0 Fake GPU");
    EXPECT_EQ(std::vector<std::filesystem::path>{tuned.path}, kept());
    ASSERT_EQ(tuned.tiles.size(), all.size() + 1);  // and that of the decode kernel
    EXPECT_EQ(Tile(tuned.tiles[0].Br, tuned.tiles[0].Bc), fastest);
    EXPECT_NEAR(tuned.tiles[0].microseconds, 250, 1e-3);
    EXPECT_NEAR(tuned.tiles[1].microseconds, 1000, 1e-3);
    EXPECT_EQ(tuned.tiles[0].predicted, fastest == predicted);
    const Details plan = details(shape);
    EXPECT_EQ(plan.get<int64_t>("Br"), winner.block_rows());
    EXPECT_EQ(plan.get<int64_t>("Bc"), winner.block_keys);
    EXPECT_EQ(plan.get<std::string>("tile_from"), "tuning");
    EXPECT_NEAR(plan.get<double>("measured_us"), 250, 1e-3);
    EXPECT_TRUE(rejects(plan, "tile ", "measured 4 times"));
    EXPECT_EQ(launched(shape), fastest);
  }
}

TEST_F(Tune, HoldsForTheClassAlone) {
  const ForwardShape shape{.batch = 3, .sq = 1024, .sk = 1024};
  tune(shape);
  ForwardShape near = shape, longer = shape, other = shape, invariant = shape;
  near.sq = 1000;
  near.lse = false;
  longer.sq = 1100;
  other.mask = causal();
  invariant.invariant = true;
  EXPECT_TRUE(tuned(details(shape)));
  EXPECT_TRUE(tuned(details(near)));
  EXPECT_FALSE(tuned(details(longer)));
  EXPECT_FALSE(tuned(details(other)));
  EXPECT_FALSE(tuned(details(invariant)));
  EXPECT_TRUE(rejects(details(invariant), "tile tuned on this device: "));
}

TEST_F(Tune, OtherProcessesFindItOnThisDeviceWithTheseKernels) {
  const ForwardShape shape{.batch = 5, .d = 64};
  const cuda::Tuned tuned = tune(shape);
  const std::string key =
      cuda::tuning_key(cuda::Gpu::at(0), make_problem(forward_call(shape).args, {}));
  const auto found = [](const std::string& text) {
    return cuda::Tunings(cuda::CacheFolder::standard()).find(text);
  };
  EXPECT_EQ(found(key).size(), tuned.tiles.size());
  EXPECT_EQ(cuda::Tunings::here().path(key), tuned.path);
  for (const std::string& part :
       {std::string("Fake GPU"), std::string("132 SMs"), std::string("232448 bytes"),
        cuda::digest(cuda::kernel_sources()), cuda::nvrtc_identity(), std::string(FULGUR_VERSION),
        tuned.shape_class}) {
    std::string other = key;
    ASSERT_TRUE(contains(key, part)) << key;
    other.replace(key.find(part), part.size(), "another");
    EXPECT_TRUE(found(other).empty()) << part;
  }
}

TEST_F(Tune, TilesTakeTurns) {
  tune({.batch = 6});
  std::vector<Tile> turns;  // whose burst it was
  for (size_t i = 0; i < state_->launches.size(); ++i) {
    if (turns.empty() || turns.back() != tile(i)) turns.push_back(tile(i));
  }
  const size_t tiles = tiles_of({.batch = 6}).size() + 1;  // and that of the decode kernel
  ASSERT_GE(turns.size(), 8 * tiles);
  for (size_t i = tiles; i < turns.size(); ++i) EXPECT_EQ(turns[i], turns[i - tiles]);
}

TEST_F(Tune, PackedCallsOfTheirStream) {
  ForwardCall call = forward_call({.batch = 7, .mask = causal(), .packed = true, .seqused = true});
  call.run.stream = reinterpret_cast<void*>(0x1230);
  EXPECT_FALSE(cuda::tune(placed(call.args, kBase), call.options, call.run).tiles.empty());
  ASSERT_FALSE(state_->launches.empty());
  for (const FakeLaunch& launch : state_->launches) EXPECT_EQ(launch.stream, call.run.stream);
  EXPECT_TRUE(tuned(fulgur::plan(call.args, call.options).details()));
}

// The fake's kernels take a millisecond, those with fast_block threads a quarter of it. The kernel
// by keys has 512 if it accumulates dQ; it and the kernel by rows have 384 otherwise.
TEST_F(Tune, BackwardPlansTakeWhatWasFastest) {
  const ForwardShape shape{.batch = 9, .mask = causal()};
  const BackwardCall call = backward_call(shape);
  for (const auto& [threads, stored] : {std::pair{512u, false}, std::pair{384u, true}}) {
    state_->fast_block = threads;
    state_->fast_keys = 0;
    const cuda::Tuned tuned = cuda::tune(placed(call.args, kBase), call.options);
    EXPECT_EQ(tuned.shape_class, cuda::shape_class(backward_problem(shape)));
    ASSERT_EQ(tuned.tiles.size(), 3u);
    EXPECT_EQ(tuned.tiles[0].family == "sm90_backward_stored", stored);
    EXPECT_LT(tuned.tiles[0].microseconds, tuned.tiles[2].microseconds);
    const Plan plan = fulgur::plan(call.args, call.options);
    EXPECT_EQ(plan.details().get<std::string>("dq") == "stored", stored);
    EXPECT_EQ(plan.details().get<std::string>("tile_from"), "tuning");
    state_->launches.clear();
    plan.run(placed(call.args, kBase));
    EXPECT_EQ(state_->launches.at(1).block, threads);  // the first kernel prepares rows
  }
  // Tuning holds neither for the forward pass nor for deterministic calls.
  const auto tile_from = [](const Plan& plan) {
    return plan.details().get<std::string>("tile_from");
  };
  const ForwardCall forward = forward_call(shape);
  EXPECT_EQ(tile_from(fulgur::plan(forward.args, forward.options)), "cost_model");
  const BackwardCall fixed = backward_call(shape, {.deterministic = true});
  EXPECT_EQ(tile_from(fulgur::plan(fixed.args, fixed.options)), "cost_model");
  EXPECT_EQ(cuda::tune(placed(fixed.args, kBase), fixed.options).tiles.size(), 2u);
  EXPECT_EQ(tile_from(fulgur::plan(call.args, call.options)), "tuning");
}

TEST_F(Tune, RefusesWhatItCannotMeasure) {
  const auto before = kept();
  const auto refused = [&](const ForwardShape& shape, Status status, const std::string& says) {
    EXPECT_EQ(status_of([&] { tune(shape); }), status);
    EXPECT_TRUE(contains(message_of([&] { tune(shape); }), says)) << says;
  };
  refused({.invariant = true}, Status::kInvalidArgument, "invariant: got true, want false");
  refused({.max_workspace = 1 << 20}, Status::kInvalidArgument,
          "max_workspace: got 1048576, want 0");
  refused({.batch = 0}, Status::kInvalidArgument, "q: got no row");
  refused({.dtype = DType::kF64, .lse = false}, Status::kUnsupported,
          "engine cuda: computes bf16, f16 and f32");
  const AppendingCall appending({.sq = 1});
  EXPECT_TRUE(
      contains(message_of([&] { cuda::tune(appending.call.args); }), "append: given, want none"));
  const ForwardCall call = forward_call({});
  EXPECT_TRUE(contains(message_of([&] { cuda::tune(call.args); }), "q: data is null"));
  int memory = 0;
  EXPECT_TRUE(
      contains(message_of([&] {
                 cuda::tune(placed(call.args, kBase), call.options, {.workspace = {&memory, 4}});
               }),
               "workspace: is given, want none"));
  const BackwardCall gradient = backward_call({});
  EXPECT_TRUE(contains(message_of([&] { cuda::tune(gradient.args); }), "dout: data is null"));
  ForwardArgs host = placed(call.args, kBase);
  host.q.device = host.k.device = host.v.device = host.out.device = host.lse.device = {};
  EXPECT_TRUE(contains(message_of([&] { cuda::tune(host); }), "computes tensors on cuda"));
  EXPECT_TRUE(state_->launches.empty());
  EXPECT_EQ(kept(), before);
}

}  // namespace
}  // namespace fulgur::test
