// What the backward pass launches.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <set>
#include <string>

#include "kernels/backward/params.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

TEST_F(OnFakeGpu, MaxWorkspace) {
  const auto plan_within = [](bool deterministic, int64_t bytes) {
    const BackwardCall call =
        backward_call({.hk = 8, .d = 64, .max_workspace = bytes}, {.deterministic = deterministic});
    return fulgur::plan(call.args, call.options);
  };
  for (const bool deterministic : {false, true}) {
    const std::string says = message_of([&] { plan_within(deterministic, 1); });
    const std::string least_is = "max_workspace: got 1 bytes, want at least ";
    ASSERT_TRUE(says.starts_with(least_is)) << says;
    const int64_t least = std::stoll(says.substr(least_is.size()));
    EXPECT_EQ(message_of([&] { plan_within(deterministic, least - 1); }),
              fmt::format("max_workspace: got {} bytes, want at least {}", least - 1, least));
    EXPECT_EQ(status_of([&] { plan_within(deterministic, least - 1); }), Status::kInvalidArgument);
    const Plan plan = plan_within(deterministic, least);
    EXPECT_EQ(plan.workspace().bytes, least);
    EXPECT_EQ(plan.details().get<int64_t>("max_workspace"), least);
    EXPECT_LT(least, plan_within(deterministic, 0).workspace().bytes);
    EXPECT_FALSE(plan_within(deterministic, 0).details().has("max_workspace"));
  }
}

TEST_F(OnFakeGpu, BackwardByStoredScoresLaunchesWaves) {
  const BackwardCall call = backward_call({.batch = 1,
                                           .sq = 40000,
                                           .sk = 40000,
                                           .hq = 2,
                                           .hk = 1,
                                           .d = 64,
                                           .mask = causal(),
                                           .invariant = true},
                                          {.dlse = true});
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_EQ(plan.details().get<std::string>("dq"), "stored");
  EXPECT_TRUE(plan.details().get<bool>("waves_split_rows"));
  const BackwardArgs args = placed(call.args, kBase);
  const WorkspaceNeed need = plan.workspace();
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const int allocated = state_->allocated;
  plan.run(args, {.workspace = {mine, need.bytes}});
  EXPECT_EQ(state_->allocated, allocated);
  std::vector<std::string> names;
  for (const FakeLaunch& launch : state_->launches) names.emplace_back(launch.kernel);
  ASSERT_GE(names.size(), 6u);
  EXPECT_EQ(names.front(), "fulgur_backward_prepare");
  EXPECT_EQ(names.back(), "fulgur_backward_repair");
  int next = 0;  // row tile
  for (size_t i = 1; i + 1 < names.size(); i += 2) {
    EXPECT_EQ(names[i], "fulgur_backward_keys");
    EXPECT_EQ(names[i + 1], "fulgur_backward_rows");
    const auto keys = params<BackwardParams>(i), rows = params<BackwardParams>(i + 1);
    EXPECT_EQ(keys.wave, rows.wave);
    EXPECT_EQ(keys.wave.first_tile, next);
    next += keys.wave.tiles;
    EXPECT_EQ(state_->launches[i].grid, 132u);
    EXPECT_EQ(state_->launches[i].block, 384u);
  }
  EXPECT_GE(next * 128, 40000);
  const auto p = params<BackwardParams>(1);
  EXPECT_EQ(p.dq.data, args.dq.data);
  EXPECT_EQ(p.dk.data, args.dk.data);
  EXPECT_EQ(p.dv_grad.data, args.dv.data);
  EXPECT_EQ(p.out.data, args.out.data);
  EXPECT_EQ(p.lse.data, args.lse.data);
  EXPECT_EQ(p.dlse.data, args.dlse.data);
  const std::array maps = {&p.q_map, &p.k_map, &p.v_map, &p.dout_map};
  const std::array inputs = {&args.q, &args.k, &args.v, &args.dout};
  for (size_t i = 0; i < maps.size(); ++i) {
    EXPECT_EQ(FakeMap::of(maps[i]).address, inputs[i]->data);
    EXPECT_EQ(FakeMap::of(maps[i]).box[1], 64u);
  }
  EXPECT_EQ(p.not_finite, p.counters + 2);
  const int64_t statistics = 2 * 40064 * 4;    // rows in multiples of 128
  const int64_t partial = 313 * 128 * 64 * 4;  // key blocks of 128 keys
  expect_apart({{p.counters, need.zeroed_bytes},
                {p.shift, statistics},
                {p.delta, statistics},
                {p.zeros, 8192},
                {p.ds, 2 * p.score_tiles.head_tiles * int64_t{128 * 128 * 2}},
                {p.partial_dk, partial},
                {p.partial_dv, partial}},
               mine, need.bytes);
}

// With no rows there is a gradient of the sinks, which is 0.
TEST_F(OnFakeGpu, SinksOfNoRowsHaveAGradient) {
  const BackwardCall call = backward_call({.sq = 0, .sk = 0, .sinks = true}, {.dsinks = true});
  plan(call.args, call.options).run(placed(call.args, kBase));
  std::set<std::string> names;
  for (const FakeLaunch& launch : state_->launches) names.insert(launch.kernel);
  EXPECT_TRUE(names.contains("fulgur_backward_sinks"));
}

TEST_F(OnFakeGpu, BackwardThatAccumulatesDqLaunchesOnce) {
  const BackwardCall call = backward_call({.batch = 3, .sq = 1000, .sk = 900, .hk = 8, .d = 64});
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_EQ(plan.details().get<std::string>("dq"), "atomic");
  const WorkspaceNeed need = plan.workspace();
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  plan.run(placed(call.args, kBase), {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 3u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_backward_prepare");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_backward_keys");
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_backward_round");
  EXPECT_EQ(state_->launches[1].block, 512u);
  // The first one comes after all that is on the stream, each other one waits by itself.
  for (const size_t i : {0, 1, 2}) EXPECT_EQ(state_->launches[i].early, i > 0);
  for (const int i : {0, 2}) {  // 64 rows of a head a CTA
    EXPECT_EQ(state_->launches[i].grid, 16u);
    EXPECT_EQ(state_->launches[i].grid_y, 24u);
  }
  const auto p = params<BackwardParams>(1);
  const int64_t statistics = 8 * 3 * 1024 * 4;
  expect_apart({{p.counters, need.zeroed_bytes},
                {p.shift, statistics},
                {p.delta, statistics},
                {p.dq_accum, statistics * 64}},
               mine, need.bytes);
  EXPECT_LT(need.bytes, need.zeroed_bytes + 67 * statistics);
}

// Each key block has an SM: the CTA that completes rows of dQ rounds them.
TEST_F(OnFakeGpu, BackwardOfAShortCallLaunchesTwoKernels) {
  const BackwardCall call = backward_call({.sq = 1000, .sk = 900, .hk = 8, .d = 64});
  const Plan plan = fulgur::plan(call.args, call.options);
  const WorkspaceNeed need = plan.workspace();
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  plan.run(placed(call.args, kBase), {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_backward_prepare");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_backward_keys");
  EXPECT_EQ(state_->launches[1].grid, 128u);
  const auto p = params<BackwardParams>(1);
  const int64_t statistics = 8 * 2 * 1024 * 4;
  expect_apart({{p.counters, need.zeroed_bytes},
                {p.shift, statistics},
                {p.delta, statistics},
                {p.dq_accum, statistics * 64},
                {p.dq_additions, statistics / 64}},
               mine, need.bytes);
}

// Graphs of drivers before CUDA 12.3 do not know of kernels that start early.
class OldGraphs : public OnFakeGpu {
 protected:
  void SetUp() override {
    const std::filesystem::path libraries = folder_ / "lib64";
    std::filesystem::create_directories(libraries);
    std::filesystem::copy_file(FAKE_NVRTC, libraries / "libnvrtc.so.12");
    setenv("CUDA_HOME", folder_.c_str(), 1);
    setenv("FAKE_CUDA_VERSION", "12020", 1);
    OnFakeGpu::SetUp();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / fmt::format("fulgur_old_graphs_{}", getpid());
};

TEST_F(OldGraphs, KernelsStartOneAfterAnother) {
  const BackwardCall call = backward_call({.batch = 3, .sq = 1000, .sk = 900, .hk = 8, .d = 64});
  fulgur::plan(call.args, call.options).run(placed(call.args, kBase));
  ASSERT_EQ(state_->launches.size(), 3u);
  for (const FakeLaunch& launch : state_->launches) EXPECT_FALSE(launch.early);
}

// Cut key blocks pass partial dK and dV on in the workspace, within one launch.
// The map of tiles of a short call is made by the first CTAs of the kernel that prepares rows;
// that of a long call by kernels of its own before that.
TEST_F(OnFakeGpu, MapsOfShortCallsAreMadeWhileRowsArePrepared) {
  const auto launched = [&](int64_t s, bool deterministic) {
    BackwardCall call = backward_call({.batch = 1, .sq = s, .sk = s, .hq = 2, .hk = 2},
                                      {.deterministic = deterministic});
    call.options.mask_mod = parse_expression("q // 100 == k // 100");
    const Plan plan = fulgur::plan(call.args, call.options);
    state_->launches.clear();
    plan.run(placed(call.args, kBase), {});
    return state_->launches;
  };
  constexpr unsigned kBlocks = 32, kBlocksOfACta = 4;  // of keys, 128 each
  const std::vector<FakeLaunch> once = launched(4096, false);
  EXPECT_STREQ(once[0].kernel, "fulgur_backward_prepare");
  EXPECT_STREQ(once[1].kernel, "fulgur_backward_keys");
  const auto p = params<BackwardParams>(1);
  EXPECT_EQ(p.expression.map_shape.key_tiles, int{kBlocks});
  EXPECT_NE(p.expression.map.words, nullptr);
  EXPECT_EQ(once[0].grid, 64u);  // chunks of 64 rows
  EXPECT_EQ(once[0].grid_y, 2u + (kBlocks / kBlocksOfACta + 63) / 64);

  const std::vector<FakeLaunch> ordered = launched(4096, true);
  EXPECT_STREQ(ordered[0].kernel, "fulgur_backward_prepare");
  const auto of_both = params<BackwardParams>(1).expression;
  EXPECT_EQ(of_both.map_of_rows.words,
            of_both.map.words + int64_t{of_both.map.block} * of_both.map_shape.key_tiles);

  const std::vector<FakeLaunch> before = launched(40000, false);
  EXPECT_STREQ(before[0].kernel, "fulgur_node_hulls");
  EXPECT_STREQ(before[1].kernel, "fulgur_tile_map");
  EXPECT_STREQ(before[2].kernel, "fulgur_backward_prepare");
  EXPECT_EQ(before[2].grid_y, 2u);
}

TEST_F(OnFakeGpu, LastBlocksOfKeysAreCut) {
  const BackwardCall call =
      backward_call({.batch = 4, .sq = 4096, .sk = 4096, .hq = 16, .hk = 16, .d = 128});
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_EQ(plan.details().get<int64_t>("cut_k_blocks"), 131);
  const WorkspaceNeed need = plan.workspace();
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  plan.run(placed(call.args, kBase), {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 3u);
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_backward_keys");
  EXPECT_EQ(state_->launches[1].grid, 132u);
  const auto p = params<BackwardParams>(1);
  EXPECT_EQ(p.cut_blocks, 131);
  EXPECT_EQ(p.first_partial, 56);  // of 64 heads, of which four are 128 blocks
  const int64_t statistics = 64 * 4096 * 4, partial = int64_t{8} * 4096 * 128 * 4;
  expect_apart({{p.counters, need.zeroed_bytes},
                {p.shift, statistics},
                {p.delta, statistics},
                {p.dq_accum, statistics * 128},
                {p.partial_dk, partial},
                {p.partial_dv, partial},
                {p.first_parts, 4}},
               mine, need.bytes);
}

// A kernel reduces partial dK and dV of the splits of a kv head before the one that rounds dQ and
// repairs.
TEST_F(OnFakeGpu, SplitsOfKvHeadsAreReduced) {
  const BackwardCall call = backward_call(
      {.batch = 1, .sq = 4096, .sk = 4096, .hq = 16, .hk = 2, .d = 80, .mask = causal()});
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_GT(plan.details().get<int64_t>("splits"), 1);
  const WorkspaceNeed need = plan.workspace();
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const BackwardArgs args = placed(call.args, kBase);
  plan.run(args, {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 4u);
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_backward_keys");
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_backward_reduce");
  EXPECT_STREQ(state_->launches[3].kernel, "fulgur_backward_round");
  EXPECT_EQ(state_->launches[2].grid,
            32u * (3 + 3));  // key blocks of 128 keys, chunks of 32 columns
  EXPECT_EQ(state_->launches[2].grid_y, 2u);
  EXPECT_EQ(state_->launches[2].block, 256u);
  const auto p = params<BackwardParams>(2);
  EXPECT_EQ(p.splits * p.split_heads, p.group * p.row_splits);
  EXPECT_EQ(p.key_blocks.batch_heads, 2 * p.splits);
  EXPECT_GE(p.row_split_tiles * p.row_splits * 64, 4096);
  EXPECT_EQ(p.dk.data, args.dk.data);
  EXPECT_EQ(p.dv_grad.data, args.dv.data);
  const int64_t statistics = 16 * 4096 * 4, partial = int64_t{2} * p.splits * 4096 * 80 * 4;
  expect_apart({{p.counters, need.zeroed_bytes},
                {p.shift, statistics},
                {p.delta, statistics},
                {p.dq_accum, statistics * 128},
                {p.partial_dk, partial},
                {p.partial_dv, partial}},
               mine, need.bytes);
}

TEST_F(OnFakeGpu, EmptyBackwardProblems) {
  for (const ForwardShape& shape : {ForwardShape{.batch = 0}, ForwardShape{.sq = 0, .sk = 0}}) {
    const BackwardCall call = backward_call(shape);
    fulgur::backward(placed(call.args, kBase), call.options);
    EXPECT_TRUE(state_->launches.empty());
  }
}

}  // namespace
}  // namespace fulgur::test
