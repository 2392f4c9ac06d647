// Runs at once: on streams, in threads, on devices, and in workspaces of the caller's.
#include <atomic>
#include <thread>

#include "device.h"

namespace fulgur::test {
namespace {

using Streams = OnGpu;
using Bytes = std::vector<std::byte>;

// Runs that share the keys of tiles out, so that they meet in a workspace, and runs that fill the
// device; over pages splits that another kernel combines, and slices of stream-K.
struct Shape {
  int64_t batch, sq, sk, heads, d, page = 0;
  DeviceCall call(uint64_t seed, int device = 0) const {
    return {batch, sq, sk, heads, d, seed, device, page};
  }
};
constexpr Shape kFewTiles{1, 1, 9000, 8, 128}, kManyTiles{2, 777, 777, 20, 64},
    kOddRows{1, 100, 3000, 3, 100}, kSplits{4, 40, 8000, 8, 128, 16},
    kSlices{5, 3, 3000, 20, 64, 24};
constexpr Shape kShapes[] = {kFewTiles, kManyTiles, kOddRows, kSplits, kSlices};

// Puts runs of both on their streams in turn and compares with each alone.
void run_in_turn(const DeviceCall& a, const Plan& plan_a, const DeviceCall& b, const Plan& plan_b) {
  const Stream streams[2];
  const DeviceCall* const calls[] = {&a, &b};
  const Plan* const plans[] = {&plan_a, &plan_b};
  const Bytes alone[] = {a.result_of(plan_a), b.result_of(plan_b)};
  for (int round = 0; round < 100; ++round) {
    for (int i = 0; i < 2; ++i) calls[i]->poison(streams[i].get());
    for (int n = 0; n < 4; ++n) {
      for (int i = 0; i < 2; ++i) plans[i]->run(calls[i]->args(), streams[i].run());
    }
    for (int i = 0; i < 2; ++i) {
      streams[i].synchronize();
      ASSERT_EQ(calls[i]->result(), alone[i]) << "stream " << i << ", round " << round;
    }
  }
}

TEST_F(Streams, TwoRunOnePlan) {
  for (const Shape& shape : kShapes) {
    const DeviceCall a = shape.call(1), b = shape.call(2);
    const Plan plan = fulgur::plan(a.args());
    run_in_turn(a, plan, b, plan);
  }
}

TEST_F(Streams, TwoRunTwoPlans) {
  const DeviceCall few = kFewTiles.call(1), many = kManyTiles.call(2), odd = kOddRows.call(3);
  const Plan plan_few = fulgur::plan(few.args()), plan_many = fulgur::plan(many.args()),
             plan_odd = fulgur::plan(odd.args());
  EXPECT_TRUE(splits(plan_few));
  run_in_turn(few, plan_few, many, plan_many);
  run_in_turn(few, plan_few, odd, plan_odd);
  const DeviceCall of_splits = kSplits.call(4), slices = kSlices.call(5);
  const Plan plan_splits = fulgur::plan(of_splits.args()),
             plan_slices = fulgur::plan(slices.args());
  EXPECT_TRUE(plan_splits.details().get<bool>("combine_kernel"));
  EXPECT_TRUE(splits(plan_slices));
  run_in_turn(of_splits, plan_splits, slices, plan_slices);
}

// A stream's runs follow each other although they share memory.
TEST_F(Streams, OneRunsTwoPlans) {
  const Stream stream;
  const DeviceCall few = kFewTiles.call(1), odd = kOddRows.call(3);
  const Plan plan_few = fulgur::plan(few.args()), plan_odd = fulgur::plan(odd.args());
  const Bytes result_few = few.result_of(plan_few), result_odd = odd.result_of(plan_odd);
  for (int round = 0; round < 50; ++round) {
    few.poison(stream.get());
    odd.poison(stream.get());
    for (int n = 0; n < 3; ++n) {
      plan_few.run(few.args(), stream.run());
      plan_odd.run(odd.args(), stream.run());
    }
    stream.synchronize();
    ASSERT_EQ(few.result(), result_few);
    ASSERT_EQ(odd.result(), result_odd);
  }
}

// Threads that each run their call 200 times; how many results were not those of the call alone.
template <class RunOnce>
int wrong_results(const DeviceCall (&calls)[2], const Bytes (&alone)[2], void* const (&streams)[2],
                  RunOnce run_once) {
  std::atomic<int> wrong = 0;
  const auto work = [&](int i) {
    use_device();
    for (int n = 0; n < 200; ++n) {
      calls[i].poison(streams[i]);
      run_once(calls[i], fulgur::Run{.stream = streams[i]});
      call_driver("cuStreamSynchronize", streams[i]);
      wrong += calls[i].result() != alone[i];
    }
  };
  { const std::jthread first(work, 0), second(work, 1); }
  return wrong;
}

TEST_F(Streams, TwoThreadsRunOnePlan) {
  const Stream streams[2];
  for (const Shape& shape : kShapes) {
    const DeviceCall calls[] = {shape.call(1), shape.call(2)};
    const Plan plan = fulgur::plan(calls[0].args());
    const Bytes alone[] = {calls[0].result_of(plan), calls[1].result_of(plan)};
    EXPECT_EQ(wrong_results(calls, alone, {streams[0].get(), streams[1].get()},
                            [&](const DeviceCall& call, const fulgur::Run& run) {
                              plan.run(call.args(), run);
                            }),
              0);
  }
}

// One handle stands for the default stream of each thread.
TEST_F(Streams, DefaultStreamsOfThreads) {
  void* const own = cuda::CU_STREAM_PER_THREAD;
  for (const Shape& shape : {kFewTiles, kOddRows}) {
    const DeviceCall calls[] = {shape.call(1), shape.call(2)};
    const Plan plan = fulgur::plan(calls[0].args());
    const Bytes alone[] = {calls[0].result_of(plan), calls[1].result_of(plan)};
    EXPECT_EQ(wrong_results(calls, alone, {own, own},
                            [&](const DeviceCall& call, const fulgur::Run& run) {
                              plan.run(call.args(), run);
                            }),
              0);
    EXPECT_EQ(wrong_results(calls, alone, {own, own},
                            [&](const DeviceCall& call, const fulgur::Run& run) {
                              forward(call.args(), {}, run);
                            }),
              0);
  }
}

// The bytes that must be 0 before the first run are 0 after each; what else the workspace holds
// does not matter.
TEST_F(Streams, WorkspaceOfTheCaller) {
  const Stream stream;
  for (const Shape& shape : kShapes) {
    const DeviceCall call = shape.call(1);
    const Plan plan = fulgur::plan(call.args());
    const Bytes result = call.result_of(plan);
    const WorkspaceNeed need = plan.workspace();
    ASSERT_GE(need.bytes, need.zeroed_bytes);
    auto* const data = static_cast<std::byte*>(cuda::allocate(need.bytes));
    ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(need.alignment), 0u);
    fill(data, need.zeroed_bytes, 0, stream.get());
    const fulgur::Run run{.stream = stream.get(), .workspace = {data, need.bytes}};
    for (int n = 0; n < 50; ++n) {
      fill(data + need.zeroed_bytes, need.bytes - need.zeroed_bytes, 0xff, stream.get());
      call.poison(stream.get());
      plan.run(call.args(), run);
      stream.synchronize();
      ASSERT_EQ(call.result(), result) << "run " << n;
      Bytes zeros(static_cast<size_t>(need.zeroed_bytes));
      cuda::copy(zeros.data(), data, need.zeroed_bytes);
      ASSERT_EQ(zeros, Bytes(zeros.size())) << "run " << n;
    }
    cuda::deallocate(data);
  }
}

// Another device gives the same bits, with the first one's context current and left so.
TEST_F(Streams, SecondDevice) {
  if (cuda::gpu_count() < 2) GTEST_SKIP() << "this machine has one CUDA device";
  for (const Shape& s : kShapes) {
    const DeviceCall here = s.call(1), there = s.call(1, 1);
    use_device(0);
    const Plan plan_here = fulgur::plan(here.args()), plan_there = fulgur::plan(there.args());
    const Bytes result = here.result_of(plan_here);
    for (int n = 0; n < 3; ++n) {
      use_device(1);
      there.poison();
      cuda::synchronize(1);
      use_device(0);
      plan_there.run(there.args());
      void* current = nullptr;
      call_driver("cuCtxGetCurrent", &current);
      EXPECT_EQ(current, static_cast<void*>(cuda::Gpu::at(0).context()));
      cuda::synchronize(1);
      EXPECT_EQ(there.result(), result);
      EXPECT_EQ(here.result_of(plan_here), result);
    }
    EXPECT_EQ(status_of([&] { plan_here.run(there.args()); }), Status::kInvalidArgument);
  }
}

}  // namespace
}  // namespace fulgur::test
