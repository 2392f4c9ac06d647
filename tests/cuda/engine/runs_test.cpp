// Runs of plans: their calls of the driver, the memory of each run, in graphs too, and how long
// they occupy the host.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "calls.h"
#include "cuda/device/launch_memory.h"
#include "fulgur/cuda.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

/// Whether a call says that CUDA does not work in a child of fork().
bool refused(const std::function<void()>& call) {
  try {
    call();
    return false;
  } catch (const Error& error) {
    return error.status() == Status::kUnavailable &&
           std::string(error.what()).find("forked") != std::string::npos;
  }
}

TEST_F(OnFakeGpu, RefusesAChildOfTheProcess) {
  ForwardCall call = forward_call({.sq = 1000, .sk = 900});
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  fulgur::forward(args, call.options, call.run);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const bool all = refused([&] { plan.run(args, call.run); }) &&
                     refused([&] { fulgur::forward(args, call.options, call.run); }) &&
                     refused([&] { fulgur::plan(args, call.options); });
    _exit(all && cuda_engine().unavailable.find("forked") != std::string::npos ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  fulgur::forward(args, call.options, call.run);  // the parent goes on
}

TEST_F(OnFakeGpu, RunOnlyLaunches) {
  const ForwardCall call = forward_call({.sq = 4096, .sk = 4096});
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase), other = placed(call.args, 2 * kBase);
  plan.run(args);
  const FakeState before = *state_;
  plan.run(args);
  plan.run(other);
  EXPECT_EQ(state_->allocated, before.allocated);
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->launches.size(), before.launches.size() + 2);
}

TEST_F(OnFakeGpu, CallsOfAShapeArePlannedOnce) {
  const ForwardCall call = forward_call({.d = 64});
  const ForwardArgs args = placed(call.args, kBase);
  fulgur::forward(args, call.options);
  const FakeState before = *state_;
  for (int i = 0; i < 10; ++i) fulgur::forward(placed(call.args, (i + 1) * kBase), call.options);
  EXPECT_EQ(state_->allocated, before.allocated);
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->launches.size(), before.launches.size() + 10);
  EXPECT_EQ(state_->contexts, 1);
}

// Launches on one stream follow each other and share memory; those on others may run with them.
TEST_F(OnFakeGpu, EachStreamHasItsWorkspace) {
  const ForwardCall call = forward_call({.d = 64});
  const ForwardArgs args = placed(call.args, kBase);
  const Plan plan = fulgur::plan(call.args, call.options),
             same = fulgur::plan(call.args, call.options);
  const auto counters = [&](const Plan& of, std::uintptr_t stream) {
    of.run(args, {.stream = reinterpret_cast<void*>(stream)});
    return params<ForwardParams>(state_->launches.size() - 1).counters;
  };
  const int* const first = counters(plan, 0x1230);
  EXPECT_EQ(counters(plan, 0x1230), first);
  EXPECT_EQ(counters(same, 0x1230), first);
  EXPECT_NE(counters(plan, 0x4560), first);
  EXPECT_NE(counters(plan, 0), first);
  // The handle of a thread's default stream names another one in each thread.
  const int* const mine = counters(plan, 2);
  EXPECT_NE(mine, first);
  EXPECT_EQ(counters(plan, 2), mine);
  const int* theirs = nullptr;
  std::thread([&] { theirs = counters(plan, 2); }).join();
  EXPECT_NE(theirs, mine);
}

TEST_F(OnFakeGpu, TheCallersWorkspace) {
  const ForwardCall call = forward_call({.sq = 192, .sk = 65536});  // split: partial results
  const ForwardArgs args = placed(call.args, kBase);
  const Plan plan = fulgur::plan(call.args, call.options);
  const WorkspaceNeed need = plan.workspace();
  EXPECT_GT(need.bytes, need.zeroed_bytes);
  EXPECT_EQ(need.zeroed_bytes, cuda::LaunchMemory::kZeroed);
  const int before = state_->allocated;
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  plan.run(args, {.workspace = {mine, need.bytes}});
  const auto p = params<ForwardParams>(0);
  EXPECT_EQ(static_cast<void*>(p.counters), mine);
  EXPECT_EQ(reinterpret_cast<char*>(p.partial), mine + need.zeroed_bytes);
  EXPECT_EQ(state_->allocated, before);
  const auto message = [&](void* data, int64_t bytes) {
    return message_of([&] { plan.run(args, {.workspace = {data, bytes}}); });
  };
  EXPECT_EQ(message(mine, need.bytes - 1),
            fmt::format("workspace: got {} bytes, want {}", need.bytes - 1, need.bytes));
  EXPECT_NE(message(mine + 64, need.bytes).find("is not aligned to 256 bytes"), std::string::npos);
  EXPECT_EQ(state_->launches.size(), 1u);
}

// Launches that are captured on one stream share memory that no other run gets while their graph
// lives.
TEST_F(OnFakeGpu, CapturedLaunchesHaveTheMemoryOfTheirGraph) {
  const ForwardCall call = forward_call({.d = 64});
  const ForwardArgs args = placed(call.args, kBase);
  const auto stream = [](uintptr_t handle) {
    return fulgur::Run{.stream = reinterpret_cast<void*>(handle)};
  };
  const auto memory_of = [&](const Plan& plan, const fulgur::Run& run, bool captured = true) {
    state_->capturing = captured ? run.stream : nullptr;
    plan.run(args, run);
    state_->capturing = nullptr;
    return params<ForwardParams>(state_->launches.size() - 1).counters;
  };
  std::set<const int*> seen;
  {
    const Plan plan = fulgur::plan(call.args, call.options);
    seen.insert(memory_of(plan, stream(0x1230), false));
    const int* const of_graph = memory_of(plan, stream(0x1230));
    EXPECT_TRUE(seen.insert(of_graph).second);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(memory_of(plan, stream(0x1230)), of_graph);
    EXPECT_TRUE(seen.insert(memory_of(plan, stream(0x4560))).second) << "they may run at once";
    EXPECT_EQ(memory_of(plan, stream(0x1230)), of_graph);
    EXPECT_FALSE(seen.insert(memory_of(plan, stream(0x1230), false)).second);
  }
  EXPECT_EQ(state_->held.size(), 2u);
  ++state_->capture;
  const Plan other = fulgur::plan(call.args, call.options);
  EXPECT_TRUE(seen.insert(memory_of(other, stream(0x1230))).second) << "the graph before lives";
  EXPECT_EQ(state_->held.size(), 3u);
  EXPECT_EQ(state_->unsafe_in_capture, 0);
  // The graphs are destroyed: their memory serves the next one.
  const int allocated = state_->allocated;
  state_->destroy_graph();
  EXPECT_TRUE(state_->held.empty());
  EXPECT_FALSE(seen.insert(memory_of(other, stream(0x1230))).second);
  EXPECT_EQ(state_->allocated, allocated);
}

// A captured launch that wants more has more, and those before keep what they have.
TEST_F(OnFakeGpu, CapturedLaunchesThatWantMoreHaveMore) {
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  std::vector<std::pair<const char*, int64_t>> blocks;  // and their requested sizes
  const size_t held = state_->held.size();
  ++state_->capture;
  for (const int64_t sq : {1, 4, 16, 2}) {
    const ForwardCall call = forward_call({.sq = sq, .sk = 5000, .hq = 8, .hk = 1});
    const Plan plan = fulgur::plan(call.args, call.options);
    for (int i = 0; i < 2; ++i) {
      state_->capturing = run.stream;
      plan.run(placed(call.args, kBase), run);
      state_->capturing = nullptr;
      const auto* data =
          reinterpret_cast<const char*>(params<DecodeParams>(state_->launches.size() - 1).tickets);
      if (blocks.empty() || blocks.back().first != data) blocks.emplace_back(data, 0);
      blocks.back().second = std::max(blocks.back().second, plan.workspace().bytes);
    }
  }
  ASSERT_EQ(blocks.size(), 3u);  // the last one has room for two queries
  EXPECT_EQ(state_->held.size(), held + 3);
  for (const auto& [x, bytes] : blocks) {
    for (const auto& [y, unused] : blocks) EXPECT_TRUE(x >= y || x + bytes <= y);
  }
}

TEST_F(OnFakeGpu, AFirstCallInACaptureIsRefused) {
  const ForwardCall call = forward_call({.sq = 1357});
  const ForwardArgs args = placed(call.args, kBase);
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const FakeState before = *state_;
  state_->capturing = run.stream;
  EXPECT_EQ(status_of([&] { fulgur::forward(args, call.options, run); }), Status::kInvalidArgument);
  const std::string said = message_of([&] { fulgur::forward(args, call.options, run); });
  EXPECT_TRUE(said.starts_with("stream: is being captured")) << said;
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->allocated, before.allocated);
  state_->capturing = nullptr;
  fulgur::forward(args, call.options, run);
  state_->capturing = run.stream;
  fulgur::forward(args, call.options, run);  // no more the first
  state_->capturing = nullptr;
  EXPECT_EQ(state_->launches.size(), 2u);
  EXPECT_EQ(state_->unsafe_in_capture, 0);
}

// The arguments of a run are its own: many threads and streams share a plan.
TEST_F(OnFakeGpu, RunsOfOnePlanOverlap) {
  const ForwardCall call = forward_call({.mask = causal(), .packed = true, .seqused = true});
  const Plan plan = fulgur::plan(call.args, call.options);
  constexpr int kThreads = 4, kRuns = 200;
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreads; ++t) {
    threads.emplace_back([&, t] {
      const ForwardArgs args = placed(call.args, t * kBase);
      for (int i = 0; i < kRuns; ++i)
        plan.run(args, {.stream = reinterpret_cast<void*>(t * 0x100)});
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(state_->launches.size(), 2u * kThreads * kRuns);
  for (const FakeLaunch& launch : state_->launches) {
    if (launch.params.size() != sizeof(ForwardParams)) continue;
    ForwardParams p;
    std::memcpy(&p, launch.params.data(), sizeof(p));
    const auto t = reinterpret_cast<std::uintptr_t>(launch.stream) / 0x100;
    const ForwardArgs args = placed(call.args, t * kBase);
    ASSERT_EQ(FakeMap::of(&p.q_map).address, args.q.data);
    ASSERT_EQ(FakeMap::of(&p.v_map).address, args.v.data);
    ASSERT_EQ(p.o.data, args.out.data);
  }
}

TEST_F(OnFakeGpu, HostTimeOfRun) {
  const ForwardCall call = forward_call({.sq = 4096, .sk = 4096});
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args[] = {placed(call.args, kBase), placed(call.args, 2 * kBase)};
  state_->record = false;
  const auto measure = [&](const auto& run) {
    double best = 1;
    for (int round = 0; round < 20; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 1000; ++i) run(args[i % 2]);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count() / 1000);
    }
    return 1e6 * best;
  };
  const double planned = measure([&](const ForwardArgs& a) { plan.run(a); });
  const double one_shot = measure([&](const ForwardArgs& a) { fulgur::forward(a, call.options); });
  const AppendingCall c({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
  const Plan appends = fulgur::plan(c.call.args, c.call.options);
  const double appending = measure([&](const ForwardArgs&) { appends.run(c.call.args); });
  fmt::print(
      "host time of run(): {:.3f} us, of forward(): {:.3f} us, of run() that appends, too: {:.3f} "
      "us "
      "(driver not counted)\n",
      planned, one_shot, appending);
  // Far above what is expected: a timed test only finds what is badly wrong.
  for (const double us : {planned, one_shot, appending}) EXPECT_LT(us, 50);
  state_->record = true;
}

TEST_F(OnFakeGpu, Memory) {
  const std::string text = "through the device";
  void* data = cuda::allocate(64);
  cuda::copy(data, text.data(), static_cast<int64_t>(text.size()));
  std::string back(text.size(), ' ');
  cuda::copy(back.data(), data, static_cast<int64_t>(back.size()));
  cuda::synchronize();
  EXPECT_EQ(back, text);
  cuda::deallocate(data);
  EXPECT_EQ(cuda::allocate(0), nullptr);
  EXPECT_EQ(status_of([] { cuda::allocate(-1); }), Status::kInvalidArgument);
  EXPECT_EQ(status_of([] { cuda::allocate(16, 5); }), Status::kUnavailable);
}

}  // namespace
}  // namespace fulgur::test
