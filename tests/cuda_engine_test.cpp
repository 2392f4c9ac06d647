// The CUDA engine on a fake driver: what it says when it cannot be used, what it asks of the
// driver, and how long run() keeps the host.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <cstring>

#include "cuda/nvrtc.h"
#include "cuda_fake_driver.h"
#include "cuda_problem.h"
#include "engines.h"
#include "fulgur/cuda.h"
#include "kernels/forward_padding_params.h"
#include "kernels/sm90/forward_params.h"

namespace fulgur::test {
namespace {

EngineInfo cuda_engine() {
  for (const EngineInfo& engine : engines()) {
    if (engine.name == "cuda") return engine;
  }
  return {};
}

// Sets the fake driver up; it is loaded once, so that every test that does so is a process of its
// own (CTest runs each with a filter).
class Unavailable : public testing::Test {
 protected:
  static std::string why(const char* name, const char* value) {
    setenv(name, value, 1);
    const std::string said = cuda_engine().unavailable;
    const ForwardCall call = forward_call({});
    EXPECT_EQ(status_of([&] { plan(call.args, call.options); }), Status::kUnavailable);
    EXPECT_NE(message_of([&] { plan(call.args, call.options); }).find(said), std::string::npos);
    EXPECT_EQ(status_of([&] { cuda::allocate(16, 7); }), Status::kUnavailable);
    return said;
  }
};

TEST_F(Unavailable, OldGpu) {
  EXPECT_EQ(why("FAKE_CUDA_CAPABILITY", "80"),
            "cuda:0 (Fake GPU) has compute capability 8.0; want 9.0 (Hopper)");
}
TEST_F(Unavailable, NewGpu) {
  EXPECT_EQ(why("FAKE_CUDA_CAPABILITY", "100"),
            "cuda:0 (Fake GPU) has compute capability 10.0; want 9.0 (Hopper)");
}
TEST_F(Unavailable, NoGpu) {
  EXPECT_EQ(why("FAKE_CUDA_DEVICES", "0"), "the driver sees no CUDA device");
}
TEST_F(Unavailable, DriverDoesNotStart) {
  const std::string said = why("FAKE_CUDA_INIT", "999");
  EXPECT_NE(said.find("does not start: a fake failure (error 999)"), std::string::npos) << said;
}
TEST_F(Unavailable, OldDriver) {
  const std::string said = why("FAKE_CUDA_VERSION", "11080");
  EXPECT_NE(said.find("supports CUDA 11.8; want 12.0 or newer"), std::string::npos) << said;
}

class OnFakeGpu : public testing::Test {
 protected:
  void SetUp() override {
    const EngineInfo engine = cuda_engine();
    if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << engine.unavailable;
    ASSERT_EQ(engine.unavailable, "");
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    ASSERT_NE(driver, nullptr);
    const auto get =
        reinterpret_cast<decltype(&fulgur_fake_state)>(dlsym(driver, "fulgur_fake_state"));
    ASSERT_NE(get, nullptr) << "a real driver was loaded";
    state_ = get();
    state_->launches.clear();
  }
  template <class Params>
  Params params(size_t launch) const {
    Params p;
    std::memcpy(&p, state_->launches.at(launch).params.data(), sizeof(p));
    return p;
  }
  FakeMap k_map(size_t launch) const {
    const auto p = params<ForwardParams>(launch);
    return FakeMap::of(&p.k_map);
  }

  static constexpr std::uintptr_t kBase = 0x7f0000000000;
  FakeState* state_ = nullptr;
};

/// Tensors at distinct places.
ForwardArgs placed(ForwardArgs args, std::uintptr_t at) {
  for (Tensor* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  return args;
}

void expect_map(const TensorMapBlob& blob, const Tensor& t, unsigned box_rows, int type) {
  const FakeMap map = FakeMap::of(&blob);
  EXPECT_EQ(map.address, t.data);
  const std::array<unsigned long long, 4> dims = {
      static_cast<unsigned long long>(t.shape[3]), static_cast<unsigned long long>(t.shape[1]),
      static_cast<unsigned long long>(t.shape[2]), static_cast<unsigned long long>(t.shape[0])};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(map.dims[i], dims[i]) << i;
  EXPECT_EQ(map.byte_strides[0], 2ull * t.strides[1]);
  EXPECT_EQ(map.byte_strides[1], 2ull * t.strides[2]);
  EXPECT_EQ(map.byte_strides[2], 2ull * t.strides[0]);
  EXPECT_EQ(map.box[0], 64u);
  EXPECT_EQ(map.box[1], box_rows);
  EXPECT_EQ(map.box[2], 1u);
  EXPECT_EQ(map.box[3], 1u);
  EXPECT_EQ(map.type, type);
  EXPECT_EQ(map.swizzle, 3);
}

TEST_F(OnFakeGpu, LaunchesWhatTheProblemSays) {
  ForwardCall call = forward_call({.sq = 1000, .sk = 900, .dv = 64, .mask = window(300, 5)});
  call.options.stream = reinterpret_cast<void*>(0x1230);
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args);
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(state_->launches[0].stream, call.options.stream);
  const auto p = params<ForwardParams>(0);
  const TileMap tiles = [&] { return plan.tiles(); }();
  expect_map(p.q_map, args.q, 64, 9);
  expect_map(p.k_map, args.k, static_cast<unsigned>(tiles.Bc), 9);
  expect_map(p.v_map, args.v, static_cast<unsigned>(tiles.Bc), 9);
  expect_map(p.o_map, args.out, 16, 9);
  EXPECT_EQ(p.o, args.out.data);
  EXPECT_EQ(p.o_batch_stride, 1000 * 8 * 64);
  EXPECT_EQ(p.o_row_stride, 8 * 64);
  EXPECT_EQ(p.o_head_stride, 64);
  EXPECT_EQ(p.lse, args.lse.data);
  EXPECT_EQ(p.lse_batch_stride, 8 * 1000);
  EXPECT_EQ(p.lse_head_stride, 1000);
  EXPECT_EQ(p.sq, 1000);
  EXPECT_EQ(p.sk, 900);
  EXPECT_EQ(p.dv, 64);
  EXPECT_EQ(p.hq, 8);
  EXPECT_EQ(p.group, 4);
  EXPECT_EQ(p.window_left, 300);
  EXPECT_EQ(p.window_right, 5);
  EXPECT_NEAR(p.scale_log2, 1.4426950408889634 / std::sqrt(128.0), 1e-7);
  EXPECT_EQ(p.heads, 16);
  EXPECT_EQ(p.row_tiles, tiles.rows);
  EXPECT_EQ(p.items, 16 * tiles.rows);
  ASSERT_NE(p.counters, nullptr);
  for (int i = 0; i < 1024; ++i) ASSERT_EQ(p.counters[i], 0);  // the fake's memory is the host's
}

TEST_F(OnFakeGpu, PackedLaunchesThePaddingToo) {
  const ForwardCall call = forward_call({.packed = true, .seqused = true});
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args);
  ASSERT_EQ(state_->launches.size(), 2u);
  const auto p = params<ForwardParams>(0);
  EXPECT_EQ(FakeMap::of(&p.k_map).dims[1], 2048ull);
  EXPECT_EQ(FakeMap::of(&p.k_map).dims[3], 1ull);
  EXPECT_EQ(p.cu_seqlens_q, call.options.cu_seqlens_q.data);
  EXPECT_EQ(p.cu_seqlens_k, call.options.cu_seqlens_k.data);
  EXPECT_EQ(p.seqused_k, call.options.seqused_k.data);
  EXPECT_EQ(p.o_batch_stride, 0);
  EXPECT_EQ(p.lse_batch_stride, 0);
  const auto padding = params<ForwardPaddingParams>(1);
  EXPECT_EQ(padding.o, args.out.data);
  EXPECT_EQ(padding.lse, args.lse.data);
  EXPECT_EQ(padding.batch, 2);
  EXPECT_EQ(padding.total_q, 2048);
  EXPECT_EQ(status_of([&] { plan.tiles(); }), Status::kUnsupported);  // lengths are on the device
}

TEST_F(OnFakeGpu, EmptyProblems) {
  for (const ForwardShape& shape : {ForwardShape{.batch = 0}, ForwardShape{.sq = 0}}) {
    const ForwardCall call = forward_call(shape);
    fulgur::forward(placed(call.args, kBase), call.options);
    EXPECT_TRUE(state_->launches.empty());
  }
  const ForwardCall no_keys = forward_call({.sk = 0});
  ForwardArgs args = placed(no_keys.args, kBase);
  args.k.data = args.v.data = nullptr;
  const Plan plan = fulgur::plan(no_keys.args, no_keys.options);
  plan.run(args);
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(k_map(0).address, args.out.data);
  args.out.data = reinterpret_cast<void*>(kBase);
  plan.run(args);
  EXPECT_EQ(k_map(1).address, args.out.data);
}

TEST_F(OnFakeGpu, MisalignedDataIsRefusedBeforeAnythingRuns) {
  const ForwardCall call = forward_call({});
  const Plan plan = fulgur::plan(call.args, call.options);
  for (Tensor ForwardArgs::*which :
       {&ForwardArgs::q, &ForwardArgs::k, &ForwardArgs::v, &ForwardArgs::out}) {
    ForwardArgs args = placed(call.args, kBase);
    auto& data = (args.*which).data;
    data = static_cast<char*>(data) + 8;
    EXPECT_EQ(status_of([&] { plan.run(args); }), Status::kInvalidArgument);
    EXPECT_NE(message_of([&] { plan.run(args); }).find("is not aligned to the 16 bytes"),
              std::string::npos);
  }
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(OnFakeGpu, RunOnlyLaunches) {
  const ForwardCall call = forward_call({.sq = 4096, .sk = 4096});
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase), other = placed(call.args, 2 * kBase);
  plan.run(args);
  const FakeState before = *state_;
  plan.run(args);
  EXPECT_EQ(state_->encoded, before.encoded);
  plan.run(other);
  EXPECT_EQ(state_->encoded, before.encoded + 4);
  EXPECT_EQ(state_->allocated, before.allocated);
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->launches.size(), before.launches.size() + 2);
}

TEST_F(OnFakeGpu, PlanningAgainReusesKernelAndWorkspace) {
  const ForwardCall call = forward_call({.d = 64});
  const ForwardArgs args = placed(call.args, kBase);
  fulgur::forward(args, call.options);
  const FakeState before = *state_;
  for (int i = 0; i < 10; ++i) fulgur::forward(args, call.options);
  EXPECT_EQ(state_->allocated, before.allocated);
  EXPECT_EQ(state_->loaded, before.loaded);
  const Plan one = fulgur::plan(call.args, call.options),
             two = fulgur::plan(call.args, call.options);
  one.run(args);
  two.run(args);
  const size_t last = state_->launches.size() - 1;
  EXPECT_NE(params<ForwardParams>(last).counters, params<ForwardParams>(last - 1).counters)
      << "two live plans share their counters";
  EXPECT_EQ(state_->contexts, 1);
}

TEST_F(OnFakeGpu, HostTimeOfRun) {
  const ForwardCall call = forward_call({.sq = 4096, .sk = 4096});
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args[] = {placed(call.args, kBase), placed(call.args, 2 * kBase)};
  state_->record = false;
  const auto measure = [&](int step) {
    double best = 1;
    for (int round = 0; round < 20; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 1000; ++i) plan.run(args[i * step % 2]);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count() / 1000);
    }
    return 1e6 * best;
  };
  const double same = measure(0), changing = measure(1);
  fmt::print("host time of run(): {:.3f} us, with new pointers {:.3f} us (driver not counted)\n",
             same, changing);
  EXPECT_LT(same, 3);
  EXPECT_LT(changing, 3);
  state_->record = true;
}

TEST_F(OnFakeGpu, ExplainTellsDecisionsAndRejections) {
  const ForwardCall call = forward_call({.sq = 16384, .sk = 16384, .mask = causal()});
  const std::string text = fulgur::plan(call.args, call.options).explain();
  for (const char* part : {"engine    cuda: Hopper kernels", "warpgroups of 64 rows", "Fake GPU",
                           "longest first", "times as long", "made for d and dv up to 256",
                           "rejected  engine cpu: computes tensors on cpu"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST_F(OnFakeGpu, UnsupportedIsSaidBeforePlanning) {
  const auto message = [](const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    EXPECT_EQ(status_of([&] { plan(call.args, call.options); }), Status::kUnsupported);
    return message_of([&] { plan(call.args, call.options); });
  };
  EXPECT_NE(message({.dtype = DType::kF32}).find("engine cuda: computes bf16 and f16"),
            std::string::npos);
  EXPECT_NE(message({.d = 512}).find("d and dv up to 256"), std::string::npos);
  EXPECT_NE(message({.hq = 1, .hk = 1, .d = 20}).find("want a positive multiple of 8"),
            std::string::npos);
  ForwardCall call = forward_call({});
  call.options.dropout.p = 0.5;
  EXPECT_NE(message_of([&] { plan(call.args, call.options); }).find("without dropout"),
            std::string::npos);
  call.options.dropout.p = 0;
  const ForwardArgs& a = call.args;
  EXPECT_NE(message_of([&] {
              plan(BackwardArgs{a.out, a.q, a.k, a.v, a.out, a.lse, a.q, a.k, a.v}, call.options);
            }).find("engine cuda: computes the forward pass"),
            std::string::npos);
  call.args.q.device.index = call.args.k.device.index = call.args.v.device.index = 3;
  call.args.out.device.index = call.args.lse.device.index = 3;
  EXPECT_NE(message_of([&] { plan(call.args, call.options); }).find("cuda:3"), std::string::npos);
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
