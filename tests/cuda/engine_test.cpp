// The CUDA engine on a fake driver: what it says when it cannot be used, what it asks of the
// driver, and how long run() keeps the host.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <thread>
#include <tuple>

#include "backward_call.h"
#include "call/make_problem.h"
#include "cuda/device/gpu.h"
#include "cuda/device/launch_memory.h"
#include "cuda/engine/shape_class.h"
#include "cuda/engine/tuning.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/sm90/forward_plan.h"
#include "engines.h"
#include "fake_driver.h"
#include "folder.h"
#include "forward_call.h"
#include "fulgur/append.h"
#include "fulgur/cuda.h"
#include "fulgur/merge.h"
#include "fulgur/version.h"
#include "kernels/common/append_params.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/common/merge_params.h"
#include "kernels/common/padding_params.h"
#include "kernels/common/upload_metadata_params.h"
#include "kernels/sm90/backward/params.h"
#include "kernels/sm90/decode/params.h"
#include "kernels/sm90/forward/params.h"
#include "rejected.h"

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
            "cuda:0 (Fake GPU) has compute capability 8.0; want 9.0 (Hopper) for attention");
}
TEST_F(Unavailable, NewGpu) {
  EXPECT_EQ(why("FAKE_CUDA_CAPABILITY", "100"),
            "cuda:0 (Fake GPU) has compute capability 10.0; want 9.0 (Hopper) for attention");
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

// CUDA_HOME has an NVRTC 13, CUDA_PATH an NVRTC 12, and the driver is for CUDA 12.
class NvrtcOfDriver : public InFolder {};

TEST_F(NvrtcOfDriver, IsNoNewer) {
  for (const auto& [variable, name] :
       {std::pair{"CUDA_HOME", "libnvrtc.so.13"}, {"CUDA_PATH", "libnvrtc.so.12"}}) {
    const std::filesystem::path root = root_ / variable;
    std::filesystem::create_directories(root / "lib64");
    std::filesystem::copy_file(FAKE_NVRTC, root / "lib64" / name);
    setenv(variable, root.c_str(), 1);
  }
  setenv("FAKE_CUDA_VERSION", "12040", 1);
  EXPECT_EQ(cuda_engine().unavailable, "");
  EXPECT_TRUE(cuda::nvrtc_identity().starts_with("12.0, ")) << cuda::nvrtc_identity();
}

class OnFakeGpu : public testing::Test {
 protected:
  void SetUp() override {
    const EngineInfo engine = cuda_engine();
    if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << engine.unavailable;
    ASSERT_EQ(engine.unavailable, "");
    find_state();
  }
  void find_state() {
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
    const bool decodes = std::is_same_v<Params, DecodeParams>;
    EXPECT_EQ(state_->launches.at(launch).params.size(),
              decodes ? sizeof(DecodeAppendParams) : sizeof(p));
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
  for (ConstTensor* t : {&args.q, &args.k, &args.v})
    t->data = reinterpret_cast<void*>(at += 0x100000000);
  for (Tensor* t : {&args.out, &args.lse}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  if (args.sinks.given()) args.sinks.data = reinterpret_cast<void*>(at += 0x100000000);
  return args;
}

BackwardArgs placed(BackwardArgs args, std::uintptr_t at) {
  for (ConstTensor* t :
       {&args.dout, &args.q, &args.k, &args.v, &args.out, &args.lse, &args.dlse, &args.sinks}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  for (Tensor* t : {&args.dq, &args.dk, &args.dv, &args.dsinks}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  return args;
}

void expect_map(const TensorMapBlob& blob, const ConstTensor& t, unsigned box_rows, int type) {
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

TEST_F(OnFakeGpu, LaunchesWhatTheProblemSays) {
  ForwardCall call =
      forward_call({.sq = 1000, .sk = 900, .dv = 64, .mask = chunked(400, window(300, 5))});
  call.run.stream = reinterpret_cast<void*>(0x1230);
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args, call.run);
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(state_->launches[0].stream, call.run.stream);
  const auto p = params<ForwardParams>(0);
  const TileMap tiles = [&] { return plan.tiles(); }();
  expect_map(p.q_map, args.q, 64, 9);
  expect_map(p.k_map, args.k, static_cast<unsigned>(tiles.Bc), 9);
  expect_map(p.v_map, args.v, static_cast<unsigned>(tiles.Bc), 9);
  expect_map(p.o_map, args.out, 16, 9);
  const auto expect_strided = [](const StridedTensor& t, const ConstTensor& want) {
    EXPECT_EQ(t.data, want.data);
    EXPECT_EQ(t.batch, want.strides[0]);
    EXPECT_EQ(t.row, want.strides[1]);
    EXPECT_EQ(t.head, want.strides[2]);
  };
  expect_strided(p.q, args.q);
  expect_strided(p.k, args.k);
  expect_strided(p.v, args.v);
  expect_strided(p.o, args.out);
  EXPECT_EQ(p.lse, args.lse.data);
  EXPECT_EQ(p.lse_batch_stride, 8 * 1000);
  EXPECT_EQ(p.lse_head_stride, 1000);
  EXPECT_EQ(p.sq, 1000);
  EXPECT_EQ(p.sk, 900);
  EXPECT_EQ(p.d, 128);
  EXPECT_EQ(p.dv, 64);
  EXPECT_EQ(p.hq, 8);
  EXPECT_EQ(p.group, 4);
  EXPECT_EQ(p.window_left, 300);
  EXPECT_EQ(p.window_right, 5);
  EXPECT_EQ(p.chunk, 400);
  EXPECT_NEAR(p.scale_log2, 1.4426950408889634 / std::sqrt(128.0), 1e-7);
  EXPECT_EQ(p.work.heads, 16);
  const int64_t Br =
      (state_->launches[0].block / 128 - 1) * tiles.Br;  // a strip for each warpgroup but the first
  EXPECT_EQ(p.work.row_blocks, (1000 + Br - 1) / Br);
  EXPECT_EQ(p.work.items, 16 * p.work.row_blocks);
  ASSERT_NE(p.counters, nullptr);
  for (int i = 0; i < 1024; ++i) ASSERT_EQ(p.counters[i], 0);  // the fake's memory is the host's
}

TEST_F(OnFakeGpu, PackedLaunchesThePaddingToo) {
  ForwardCall call = forward_call({.packed = true, .seqused_q = true, .seqused = true});
  const int used[4] = {};  // nobody reads them
  call.args.lengths.seqused_q.data = used;
  call.args.lengths.seqused_k.data = used + 2;
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args);
  ASSERT_EQ(state_->launches.size(), 2u);
  const auto p = params<ForwardParams>(0);
  EXPECT_EQ(FakeMap::of(&p.k_map).dims[1], 2048ull);
  EXPECT_EQ(FakeMap::of(&p.k_map).dims[3], 1ull);
  EXPECT_EQ(p.cu_seqlens_q, call.args.lengths.cu_seqlens_q.data);
  EXPECT_EQ(p.cu_seqlens_k, call.args.lengths.cu_seqlens_k.data);
  EXPECT_EQ(p.seqused_q, call.args.lengths.seqused_q.data);
  EXPECT_EQ(p.seqused_k, call.args.lengths.seqused_k.data);
  EXPECT_EQ(p.o.batch, 0);
  EXPECT_EQ(p.lse_batch_stride, 0);
  const auto padding = params<ForwardPaddingParams>(1);
  EXPECT_EQ(padding.o, args.out.data);
  EXPECT_EQ(padding.lse, args.lse.data);
  EXPECT_EQ(padding.batch, 2);
  EXPECT_EQ(padding.total_q, 2048);
  EXPECT_EQ(padding.cu_seqlens_q, p.cu_seqlens_q);
  EXPECT_EQ(padding.seqused_q, p.seqused_q);
  EXPECT_EQ(status_of([&] { plan.tiles(); }), Status::kUnsupported);  // lengths are on the device
}

// Of prefill and of decoding, in as many CTAs as fill the device.
TEST_F(OnFakeGpu, UsedQueriesLaunchThePaddingToo) {
  for (const int64_t sq : {1, 1024}) {
    SCOPED_TRACE(sq);
    for (const auto& [batch, x] : {std::pair{2, 528u}, {100, 11u}, {5000, 1u}}) {
      const ForwardCall call =
          forward_call({.batch = batch, .sq = sq, .hq = 4, .hk = 4, .d = 64, .seqused_q = true});
      const ForwardArgs args = placed(call.args, kBase);
      state_->launches.clear();
      fulgur::plan(args, call.options).run(args);
      ASSERT_EQ(state_->launches.size(), 2u);
      const auto padding = params<ForwardPaddingParams>(1);
      EXPECT_EQ(state_->launches[1].grid, x);
      EXPECT_EQ(state_->launches[1].grid_y, static_cast<unsigned>(batch));
      EXPECT_EQ(padding.o, args.out.data);
      EXPECT_EQ(padding.o_batch_stride, sq * 4 * 64);
      EXPECT_EQ(padding.lse_batch_stride, sq * 4);
      EXPECT_EQ(padding.cu_seqlens_q, nullptr);
      EXPECT_EQ(padding.seqused_q, args.lengths.seqused_q.data);
      EXPECT_EQ(padding.sq, sq);
      if (sq == 1) {
        EXPECT_EQ(params<DecodeParams>(0).seqused_q, args.lengths.seqused_q.data);
      }
    }
  }
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

// Odd rows and odd addresses: q, k and v are copied on the device, every run anew.
TEST_F(OnFakeGpu, WhatTheCopyEngineCannotAddressIsCopied) {
  for (const ForwardShape& shape : {ForwardShape{.d = 17}, ForwardShape{.base = kBase + 8}}) {
    state_->launches.clear();
    const ForwardCall call = forward_call(shape);
    const Plan plan = fulgur::plan(call.args, call.options);
    EXPECT_GE(plan.workspace().bytes, 2 * 1024 * (8 + 2 + 2) * 24 * 2);
    const ForwardArgs args = placed(call.args, kBase + (shape.base != 0 ? 8 : 0));
    for (int run = 0; run < 2; ++run) {
      plan.run(args);
      ASSERT_EQ(state_->launches.size(), 4u * (run + 1));
      const auto p = params<ForwardParams>(4 * run + 3);
      const std::array<const ConstTensor*, 3> inputs = {&args.q, &args.k, &args.v};
      const std::array tensors = {&p.q, &p.k, &p.v};
      const std::array maps = {&p.q_map, &p.k_map, &p.v_map};
      const int64_t row = (call.args.q.shape[3] + 7) / 8 * 8;
      for (size_t i = 0; i < inputs.size(); ++i) {
        const auto copy = params<ForwardCopyParams>(4 * run + i);
        const ConstTensor& t = *inputs[i];
        EXPECT_EQ(copy.from, t.data);
        EXPECT_EQ(copy.batch_stride, t.strides[0]);
        EXPECT_EQ(copy.row_stride, t.strides[1]);
        EXPECT_EQ(copy.head_stride, t.strides[2]);
        EXPECT_EQ(copy.rows, t.shape[1]);
        EXPECT_EQ(copy.heads, t.shape[2]);
        EXPECT_EQ(copy.dim, t.shape[3]);
        EXPECT_EQ(copy.chunks * 8, row);
        EXPECT_EQ(tensors[i]->data, copy.to);
        EXPECT_EQ(tensors[i]->row, t.shape[2] * row);
        const FakeMap map = FakeMap::of(maps[i]);
        EXPECT_EQ(map.address, copy.to);
        EXPECT_EQ(map.dims[0], static_cast<unsigned long long>(t.shape[3]));
        EXPECT_EQ(map.byte_strides[1], static_cast<unsigned long long>(2 * row));
      }
      EXPECT_EQ(p.o.data, args.out.data);
    }
    EXPECT_TRUE(plan.details().has("copies"));
  }
}

TEST_F(OnFakeGpu, MisalignedDataIsRefusedBeforeAnythingRuns) {
  const ForwardCall call = forward_call({});
  const Plan plan = fulgur::plan(call.args, call.options);
  for (int which = 0; which < 4; ++which) {
    ForwardArgs args = placed(call.args, kBase);
    if (which < 3) {
      const void*& data = (which == 0 ? args.q : which == 1 ? args.k : args.v).data;
      data = static_cast<const char*>(data) + 8;
    } else {
      args.out.data = static_cast<char*>(args.out.data) + 8;
    }
    EXPECT_EQ(status_of([&] { plan.run(args); }), Status::kInvalidArgument);
    EXPECT_NE(message_of([&] { plan.run(args); }).find("is not aligned to 16 bytes"),
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

TEST_F(OnFakeGpu, DecodeReadsACacheWhereItIs) {
  ForwardCall call = forward_call({.dtype = DType::kF16, .batch = 3, .sq = 1, .seqused = true});
  ForwardArgs& args = call.args;
  const Device device{DeviceType::kCuda, 0};
  const auto at = [](int64_t offset) { return reinterpret_cast<void*>(kBase + offset); };
  for (ConstTensor* t : {&args.k, &args.v}) {
    *t = Tensor::contiguous(nullptr, DType::kF16, {40, 16, 2, 128}, device);
    t->strides[0] = 9000;
  }
  args.cache.page_table = Tensor::contiguous(nullptr, DType::kI32, {3, 7}, device);
  args.cache.page_table.strides[0] = 12;
  args = placed(args, kBase);
  args.cache.page_table.data = at(64);
  args.k.data = at(256);
  args.v.data = at(512);
  const Plan plan = fulgur::plan(args, call.options);
  EXPECT_EQ(plan.details().get<int64_t>("call.page"), 16);
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const WorkspaceNeed need = plan.workspace();
  plan.run(args, {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(state_->launches[0].kernel, std::string("fulgur_decode"));
  EXPECT_EQ(state_->launches[0].grid, 132u);
  const auto p = params<DecodeParams>(0);
  EXPECT_EQ(static_cast<void*>(p.k.data), at(256));
  EXPECT_EQ(static_cast<void*>(p.v.data), at(512));
  EXPECT_EQ(p.k.batch, 9000);
  EXPECT_EQ(p.k.row, 256);
  EXPECT_EQ(p.k.head, 128);
  EXPECT_EQ(static_cast<const void*>(p.pages.table), at(64));
  EXPECT_EQ(p.pages.table_stride, 12);
  EXPECT_EQ(p.pages.ids, 7);
  EXPECT_EQ(p.pages.entries, 40);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.hk, 2);
  EXPECT_EQ(static_cast<const void*>(p.seqused_k), args.lengths.seqused_k.data);
  EXPECT_EQ(static_cast<void*>(p.tickets), mine);
  EXPECT_EQ(reinterpret_cast<char*>(p.partial), mine + need.zeroed_bytes);
  // K and V are copied 16 bytes at a time: a call must keep what the plan was told.
  args.k.data = at(258);
  EXPECT_NE(message_of([&] { plan.run(args); }).find("k: data"), std::string::npos);
}

// A cache of rows that lanes cannot copy 16 bytes at a time: all of its pages come to where they
// can.
TEST_F(OnFakeGpu, DecodeCopiesACacheOfOddRows) {
  ForwardCall call =
      forward_call({.batch = 3, .sq = 1, .hq = 4, .hk = 2, .d = 20, .seqused = true});
  ForwardArgs& args = call.args;
  const Device device{DeviceType::kCuda, 0};
  for (ConstTensor* t : {&args.k, &args.v})
    *t = Tensor::contiguous(nullptr, DType::kBF16, {40, 16, 2, 20}, device);
  args.cache.page_table =
      Tensor::contiguous(reinterpret_cast<void*>(kBase + 64), DType::kI32, {3, 7}, device);
  const Plan plan = fulgur::plan(args, call.options);
  EXPECT_TRUE(plan.details().has("copies.k"));
  const ForwardArgs there = placed(args, kBase);
  plan.run(there);
  ASSERT_EQ(state_->launches.size(), 3u);
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_decode");
  const auto p = params<DecodeParams>(2);
  for (const auto& [launch, from, to] :
       {std::tuple{0, &there.k, &p.k}, std::tuple{1, &there.v, &p.v}}) {
    EXPECT_STREQ(state_->launches[static_cast<size_t>(launch)].kernel, "fulgur_forward_copy");
    const auto copy = params<ForwardCopyParams>(static_cast<size_t>(launch));
    EXPECT_EQ(static_cast<const void*>(copy.from), from->data);
    EXPECT_EQ(copy.to, static_cast<void*>(to->data));
    EXPECT_EQ(copy.batch, 40);
    EXPECT_EQ(copy.rows, 16);
    EXPECT_EQ(to->batch, 16 * 2 * 24);
    EXPECT_EQ(to->row, 2 * 24);
    EXPECT_EQ(to->head, 24);
  }
}

/// A call over pages of 16 keys that appends new rows, as many as there are queries.
struct AppendingCall {
  ForwardCall call;

  explicit AppendingCall(const ForwardShape& shape, int64_t fresh = 0) : call(forward_call(shape)) {
    ForwardArgs& args = call.args;
    std::uintptr_t at = 0x7e0000000000;
    const auto tensor = [&](DType type, std::initializer_list<int64_t> sizes) {
      return Tensor::contiguous(reinterpret_cast<void*>(at += 0x100000000), type, sizes,
                                {DeviceType::kCuda, 0});
    };
    const int64_t batch = shape.batch, pages = (shape.sk + 15) / 16;
    if (fresh == 0) fresh = shape.sq;
    args.cache.page_table = tensor(DType::kI32, {batch, pages});
    args.append = {.k_cache = tensor(shape.dtype, {batch * pages, 16, shape.hk, shape.d}),
                   .v_cache = tensor(shape.dtype, {batch * pages, 16, shape.hk, shape.d}),
                   .k_new = tensor(shape.dtype, {batch, fresh, shape.hk, shape.d}),
                   .v_new = tensor(shape.dtype, {batch, fresh, shape.hk, shape.d}),
                   .cache_seqlens = tensor(DType::kI32, {batch}),
                   .rotary = {.cos = tensor(shape.dtype, {16 * pages, 32}),
                              .sin = tensor(shape.dtype, {16 * pages, 32})}};
    args.k = args.v = {};
    args.q.data = tensor(shape.dtype, {1}).data;
    for (Tensor* t : {&args.out, &args.lse}) t->data = tensor(shape.dtype, {1}).data;
  }
  AppendingCall(const AppendingCall&) = delete;
};

/// What a kernel uses of the workspace: where, and how many bytes.
struct Used {
  const void* begin;
  int64_t bytes;
};

/// They lie in the caller's workspace, aligned and apart.
void expect_apart(std::vector<Used> used, const char* begin, int64_t bytes) {
  std::ranges::sort(used, {}, &Used::begin);
  const char* end = begin;
  for (const auto& [at, size] : used) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % 256, 0u);
    EXPECT_GE(static_cast<const char*>(at), end);
    end = static_cast<const char*>(at) + size;
  }
  EXPECT_LE(end, begin + bytes);
}

// Of an invariant call whose sequences may have few rows and many, the forward kernel has some and
// the decode kernel the others, in one workspace.
TEST_F(OnFakeGpu, SequencesOfFewAndOfManyRowsTakeTwoKernels) {
  const ForwardCall call =
      forward_call({.sq = 300, .sk = 9000, .hq = 8, .packed = true, .invariant = true});
  const ForwardArgs args = placed(call.args, kBase);
  const Plan plan = fulgur::plan(call.args, call.options);
  const Details details = plan.details();
  EXPECT_EQ(details.get<std::string>("kernel"), "sm90_forward");
  EXPECT_EQ(details.get<std::string>("few_rows.kernel"), "sm90_decode");
  EXPECT_EQ(details.get<std::string>("few_rows.schedule"), "invariant_splits");
  EXPECT_EQ(details.get<int64_t>("few_rows.splits"), 9);
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const WorkspaceNeed need = plan.workspace();
  plan.run(args, {.workspace = {mine, need.bytes}});
  const char* const kernels[] = {"fulgur_forward", "fulgur_forward_padding", "fulgur_decode",
                                 "fulgur_decode_combine"};
  ASSERT_EQ(state_->launches.size(), std::size(kernels));
  for (size_t i = 0; i < std::size(kernels); ++i)
    EXPECT_STREQ(state_->launches[i].kernel, kernels[i]);
  const auto p = params<DecodeParams>(2);
  EXPECT_EQ(p.sq, 300);  // beyond 16 they are told by their own length
  EXPECT_EQ(static_cast<void*>(p.tickets), mine);
  const int64_t pieces = 18000 / 512 * 2 * 64 * 132 * int64_t{4};
  expect_apart({{p.tickets, need.zeroed_bytes}, {p.partial, pieces}}, mine, need.bytes);
  EXPECT_EQ(need.bytes, need.zeroed_bytes + pieces);
}

// What lanes cannot copy 16 bytes at a time comes to where they can: an invariant call's kernel
// does not depend on where keys lie.
TEST_F(OnFakeGpu, FewRowsOfInvariantCallsCopyWhatIsNotWhole) {
  const ForwardCall call = forward_call(
      {.batch = 3, .sq = 1, .sk = 9000, .hq = 8, .d = 20, .dv = 64, .invariant = true});
  const ForwardArgs args = placed(call.args, kBase);
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_TRUE(plan.details().has("copies.k"));
  EXPECT_FALSE(plan.details().has("copies.v"));
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const WorkspaceNeed need = plan.workspace();
  plan.run(args, {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 3u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_forward_copy");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_decode");
  const auto copy = params<ForwardCopyParams>(0);
  const auto p = params<DecodeParams>(1);
  EXPECT_EQ(static_cast<const void*>(copy.from), args.k.data);
  EXPECT_EQ(static_cast<void*>(copy.to), static_cast<void*>(p.k.data));
  EXPECT_EQ(p.k.head, 24);
  EXPECT_EQ(p.k.row, 48);
  EXPECT_EQ(p.k.batch, 9000 * 48);
  EXPECT_EQ(static_cast<const void*>(p.v.data), args.v.data);
  expect_apart({{p.tickets, need.zeroed_bytes},
                {p.k.data, int64_t{3} * 9000 * 48 * 2},
                {p.partial, int64_t{3} * 2 * 9 * 4 * 68 * 4}},
               mine, need.bytes);
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

TEST_F(OnFakeGpu, SinksGoToTheirKernels) {
  const ForwardCall forward = forward_call({.sinks = true});
  const ForwardArgs there = placed(forward.args, kBase);
  plan(forward.args, forward.options).run(there);
  EXPECT_EQ(params<ForwardParams>(0).sinks, there.sinks.data);
  const ForwardCall decode = forward_call({.sq = 1, .seqused = true, .sinks = true});
  const ForwardArgs few = placed(decode.args, kBase);
  plan(decode.args, decode.options).run(few);
  ASSERT_STREQ(state_->launches[1].kernel, "fulgur_decode");
  EXPECT_EQ(params<DecodeParams>(1).sinks, few.sinks.data);

  const BackwardCall call = backward_call({.hk = 8, .sinks = true}, {.dsinks = true});
  const BackwardArgs args = placed(call.args, kBase);
  plan(call.args, call.options).run(args);
  ASSERT_EQ(state_->launches.size(), 6u);
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_backward_prepare");
  EXPECT_STREQ(state_->launches[3].kernel, "fulgur_backward_sinks");
  EXPECT_EQ(state_->launches[3].grid, 8u);  // heads
  EXPECT_EQ(params<BackwardParams>(3).sinks, args.sinks.data);
  EXPECT_EQ(params<BackwardParams>(3).dsinks, args.dsinks.data);
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
  const BackwardCall call = backward_call({.sq = 1000, .sk = 900, .hk = 8, .d = 64});
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
    EXPECT_EQ(state_->launches[i].grid_y, 16u);
  }
  const auto p = params<BackwardParams>(1);
  const int64_t statistics = 8 * 2 * 1024 * 4;
  expect_apart({{p.counters, need.zeroed_bytes},
                {p.shift, statistics},
                {p.delta, statistics},
                {p.dq_accum, statistics * 64}},
               mine, need.bytes);
  EXPECT_LT(need.bytes, need.zeroed_bytes + 67 * statistics);
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
  const BackwardCall call = backward_call({.sq = 1000, .sk = 900, .hk = 8, .d = 64});
  fulgur::plan(call.args, call.options).run(placed(call.args, kBase));
  ASSERT_EQ(state_->launches.size(), 3u);
  for (const FakeLaunch& launch : state_->launches) EXPECT_FALSE(launch.early);
}

// Cut key blocks pass partial dK and dV on in the workspace, within one launch.
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

// Launches that are captured on one stream have memory in common that nobody else gets while their
// graph lives.
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
  std::vector<std::pair<const char*, int64_t>> blocks;  // and what was asked for
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

/// A packed call of `batch` sequences of 200 rows, with its lengths on the host.
struct CallWithHostLengths {
  static constexpr int kRows = 200;
  std::vector<int32_t> cu_seqlens, used;
  ForwardCall call;

  explicit CallWithHostLengths(int batch)
      : cu_seqlens(static_cast<size_t>(batch) + 1),
        used(static_cast<size_t>(batch), 2),
        call(forward_call({.batch = batch,
                           .sq = kRows,
                           .sk = kRows,
                           .hq = 2,
                           .hk = 2,
                           .d = 64,
                           .packed = true,
                           .seqused_q = true,
                           .seqused = true})) {
    for (int b = 0; b <= batch; ++b) cu_seqlens[static_cast<size_t>(b)] = kRows * b;
    call.args.lengths.cu_seqlens_q = call.args.lengths.cu_seqlens_k =
        ConstTensor::of<const int32_t>(std::span(cu_seqlens), {batch + 1});
    call.args.lengths.seqused_q = call.args.lengths.seqused_k =
        ConstTensor::of<const int32_t>(std::span(used), {batch});
    call.options.max_seqlen_q = call.options.max_seqlen_k = 0;
  }
  std::vector<int32_t> numbers() const {
    std::vector<int32_t> all = cu_seqlens;
    all.insert(all.end(), cu_seqlens.begin(), cu_seqlens.end());
    for (int i = 0; i < 2; ++i) all.insert(all.end(), used.begin(), used.end());
    return all;
  }
};

TEST_F(OnFakeGpu, LengthsOfTheHostGoAheadOfTheKernels) {
  for (const int batch : {1, 249, 250, 1000}) {
    SCOPED_TRACE(batch);
    CallWithHostLengths c(batch);
    const Plan plan = fulgur::plan(c.call.args, c.call.options);
    const auto count = static_cast<size_t>(4 * batch + 2), stores = (count - 1) / 1000 + 1;
    const Details details = plan.details();
    EXPECT_EQ(details.get<Details::Texts>("host_metadata"),
              (Details::Texts{"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"}));
    EXPECT_EQ(details.get<int64_t>("uploaded_numbers"), static_cast<int64_t>(count));
    EXPECT_EQ(details.get<int64_t>("upload_launches"), static_cast<int64_t>(stores));
    state_->launches.clear();
    const auto numbers = c.numbers();
    plan.run(placed(c.call.args, kBase));
    std::fill(c.cu_seqlens.begin(), c.cu_seqlens.end(), -1);
    ASSERT_EQ(state_->launches.size(), stores + 2);
    const auto p = params<ForwardParams>(stores);
    std::vector<int32_t> launched;
    for (size_t i = 0; i < stores; ++i) {
      const auto store = params<UploadMetadataParams>(i);
      EXPECT_STREQ(state_->launches[i].kernel, "fulgur_upload_metadata");
      EXPECT_EQ(store.to, p.cu_seqlens_q + launched.size());
      EXPECT_GE(state_->launches[i].grid * state_->launches[i].block,
                static_cast<unsigned>(store.count));
      launched.insert(launched.end(), store.numbers, store.numbers + store.count);
    }
    EXPECT_EQ(launched, numbers);
    EXPECT_EQ(p.cu_seqlens_k, p.cu_seqlens_q + batch + 1);
    EXPECT_EQ(p.seqused_q, p.cu_seqlens_k + batch + 1);
    EXPECT_EQ(p.seqused_k, p.seqused_q + batch);
    const auto padding = params<ForwardPaddingParams>(stores + 1);
    EXPECT_EQ(padding.cu_seqlens_q, p.cu_seqlens_q);
    EXPECT_EQ(padding.seqused_q, p.seqused_q);
  }
}

TEST_F(OnFakeGpu, LengthsOfTheHostStayInsideOfTheWorkspace) {
  CallWithHostLengths c(5);
  const Plan plan = fulgur::plan(c.call.args, c.call.options);
  const int64_t bytes = plan.workspace().bytes;
  plan.run(placed(c.call.args, kBase), {.workspace = {reinterpret_cast<void*>(kBase), bytes}});
  const auto store = params<UploadMetadataParams>(0);
  const auto begin = reinterpret_cast<std::uintptr_t>(store.to);
  EXPECT_GE(begin, kBase + cuda::LaunchMemory::kZeroed);
  EXPECT_EQ(begin % 4, 0u);
  EXPECT_EQ(store.count, 22);
  EXPECT_LE(begin + 22 * 4, kBase + static_cast<std::uintptr_t>(bytes));
}

/// The numbers that a launch stores, as floats.
std::vector<float> stored_floats(const UploadMetadataParams& store) {
  std::vector<float> floats(static_cast<size_t>(store.count));
  std::memcpy(floats.data(), store.numbers, floats.size() * sizeof(float));
  return floats;
}

// Whatever the strides of slopes are on the host.
TEST_F(OnFakeGpu, SlopesAndSinksOfTheHostGoSideBySide) {
  constexpr int64_t kBatch = 3, kHq = 8;
  for (const int64_t sq : {1, 1000}) {
    for (const int64_t stride : {8, 13, 0, -9}) {
      SCOPED_TRACE(fmt::format("{} rows, stride {}", sq, stride));
      std::vector<float> memory(64), sinks(kHq);
      std::iota(memory.begin(), memory.end(), 0.5f);
      std::iota(sinks.begin(), sinks.end(), -3.0f);
      ForwardCall call =
          forward_call({.batch = kBatch, .sq = sq, .hq = kHq, .alibi = true, .sinks = true});
      ForwardArgs args = placed(call.args, kBase);
      float* const first = memory.data() + (stride < 0 ? 2 * -stride : 0);
      args.alibi_slopes = ConstTensor::contiguous(first, DType::kF32, {kBatch, kHq});
      args.alibi_slopes.strides[0] = stride;
      args.sinks = ConstTensor::of<const float>(std::span(sinks), {kHq});
      std::vector<float> numbers;
      for (int64_t b = 0; b < kBatch; ++b) {
        numbers.insert(numbers.end(), first + b * stride, first + b * stride + kHq);
      }
      numbers.insert(numbers.end(), sinks.begin(), sinks.end());
      const Plan plan = fulgur::plan(args, call.options);
      const Details details = plan.details();
      EXPECT_EQ(details.get<Details::Texts>("host_metadata"),
                (Details::Texts{"alibi_slopes", "sinks"}));
      EXPECT_EQ(details.get<int64_t>("uploaded_numbers"), 32);
      EXPECT_EQ(details.get<int64_t>("upload_launches"), 1);
      state_->launches.clear();
      plan.run(args);
      std::fill(memory.begin(), memory.end(), -1.0f);
      std::fill(sinks.begin(), sinks.end(), -1.0f);
      ASSERT_EQ(state_->launches.size(), 2u);
      const auto store = params<UploadMetadataParams>(0);
      EXPECT_EQ(stored_floats(store), numbers);
      const auto expect = [&](const auto& p) {
        EXPECT_EQ(static_cast<const void*>(p.alibi_slopes), store.to);
        EXPECT_EQ(p.alibi_batch_stride, kHq);
        EXPECT_EQ(p.sinks, p.alibi_slopes + kBatch * kHq);
      };
      if (sq == 1) {
        expect(params<DecodeParams>(1));
      } else {
        expect(params<ForwardParams>(1));
      }
    }
  }
}

TEST_F(OnFakeGpu, SlopesAndSinksOfTheHostGoToTheGradients) {
  std::vector<float> slopes = {1, 2, 3, 4, 5, 6, 7, 8}, sinks = {8, 7, 6, 5, 4, 3, 2, 1};
  const BackwardCall call =
      backward_call({.hk = 8, .alibi = true, .sinks = true}, {.dsinks = true});
  BackwardArgs args = placed(call.args, kBase);
  args.alibi_slopes = ConstTensor::of<const float>(std::span(slopes), {8});
  args.sinks = ConstTensor::of<const float>(std::span(sinks), {8});
  const Plan plan = fulgur::plan(args, call.options);
  const int64_t bytes = plan.workspace().bytes;
  plan.run(args, {.workspace = {reinterpret_cast<void*>(2 * kBase), bytes}});
  ASSERT_EQ(state_->launches.size(), 5u);
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored_floats(store),
            (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1}));
  const auto begin = reinterpret_cast<std::uintptr_t>(store.to);
  EXPECT_GE(begin, 2 * kBase + cuda::LaunchMemory::kZeroed);
  EXPECT_LE(begin + 16 * 4, 2 * kBase + static_cast<std::uintptr_t>(bytes));
  for (size_t i = 1; i < 5; ++i) {
    const auto p = params<BackwardParams>(i);
    EXPECT_EQ(static_cast<const void*>(p.alibi_slopes), store.to);
    EXPECT_EQ(p.alibi_batch_stride, 0);
    EXPECT_EQ(p.sinks, p.alibi_slopes + 8);
    EXPECT_EQ(p.dsinks, args.dsinks.data);
  }
}

// The kernel of dsinks reads the sinks, rows or not.
TEST_F(OnFakeGpu, SinksOfTheHostBesideNoRows) {
  std::vector<float> slopes(16), sinks(8, 0.5f);
  const BackwardCall call =
      backward_call({.sq = 0, .sk = 0, .alibi = true, .sinks = true}, {.dsinks = true});
  BackwardArgs args = placed(call.args, kBase);
  args.alibi_slopes = ConstTensor::of<const float>(std::span(slopes), {2, 8});
  args.sinks = ConstTensor::of<const float>(std::span(sinks), {8});
  plan(args, call.options).run(args);
  ASSERT_FALSE(state_->launches.empty());
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored_floats(store), sinks);
  for (size_t i = 1; i < state_->launches.size(); ++i) {
    EXPECT_EQ(static_cast<const void*>(params<BackwardParams>(i).sinks), store.to);
  }
  state_->launches.clear();
  args.dsinks = {};
  plan(args, call.options).run(args);
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(OnFakeGpu, WrongPlacesOfSlopesAndSinks) {
  const BackwardCall call = backward_call({.alibi = true, .sinks = true}, {.dsinks = true});
  const auto said = [&](auto BackwardArgs::*tensor, Device device) {
    BackwardArgs args = call.args;
    (args.*tensor).device = device;
    return message_of([&] { fulgur::plan(args, call.options); });
  };
  const Device other{DeviceType::kCuda, 1};
  EXPECT_EQ(said(&BackwardArgs::alibi_slopes, other),
            "alibi_slopes: on cuda:1, want cuda:0 as q, or cpu");
  EXPECT_EQ(said(&BackwardArgs::sinks, other), "sinks: on cuda:1, want cuda:0 as q, or cpu");
  EXPECT_EQ(said(&BackwardArgs::dsinks, {}), "dsinks: on cpu, want cuda:0 as q");
  // A plan is for slopes in one place.
  const BackwardArgs args = placed(call.args, kBase);
  const Plan plan = fulgur::plan(args, call.options);
  BackwardArgs elsewhere = args;
  elsewhere.alibi_slopes.device = {};
  EXPECT_EQ(message_of([&] { plan.run(elsewhere); }),
            "alibi_slopes: got f32 (8) strides (1) on cpu, want f32 (8) strides (1) on cuda:0 as "
            "planned");
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(OnFakeGpu, WrongLengthsOfTheHostLaunchNothing) {
  CallWithHostLengths c(5);
  const Plan plan = fulgur::plan(c.call.args, c.call.options);
  const ForwardArgs args = placed(c.call.args, kBase);
  ForwardArgs misaligned = args;
  misaligned.q.data = static_cast<const char*>(args.q.data) + 8;
  EXPECT_EQ(status_of([&] { plan.run(misaligned); }), Status::kInvalidArgument);
  c.used[3] = 201;
  EXPECT_EQ(message_of([&] { plan.run(args); }), "seqused_q: got 201 at 3, want 0 to 200");
  c.cu_seqlens[2] = 1;
  EXPECT_EQ(message_of([&] { plan.run(args); }),
            "cu_seqlens_q: decreases at 2: 1 after 200, want non-decreasing");
  EXPECT_TRUE(state_->launches.empty());
  c.cu_seqlens[2] = 400;
  // A plan is for lengths in one place.
  ForwardArgs elsewhere = args;
  elsewhere.lengths.seqused_k.device = args.q.device;
  EXPECT_EQ(message_of([&] { plan.run(elsewhere); }),
            "seqused_k: got i32 (5) strides (1) on cuda:0, want i32 (5) strides (1) on cpu as "
            "planned");
  elsewhere.lengths.seqused_k.device.index = 1;
  EXPECT_EQ(message_of([&] { fulgur::plan(elsewhere, c.call.options); }),
            "seqused_k: on cuda:1, want cuda:0 as q, or cpu");
}

TEST_F(OnFakeGpu, CapturedLengthsOfTheHostHaveTheMemoryOfTheirGraph) {
  CallWithHostLengths c(5);
  const ForwardArgs args = placed(c.call.args, kBase);
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const Plan plan = fulgur::plan(args, c.call.options);
  plan.run(args, run);
  const FakeState before = *state_;
  const int* const of_stream = params<UploadMetadataParams>(0).to;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    c.used[0] = i;
    plan.run(args, run);
    const auto store = params<UploadMetadataParams>(state_->launches.size() - 3);
    EXPECT_NE(store.to, of_stream);
    EXPECT_EQ(store.numbers[12], i);
  }
  state_->capturing = nullptr;
  state_->destroy_graph();
  EXPECT_EQ(state_->unsafe_in_capture, before.unsafe_in_capture);
}

TEST_F(OnFakeGpu, CapturedSlopesOfTheHostAreThoseOfTheirCapture) {
  std::vector<float> slopes(8);
  const ForwardCall call = forward_call({.alibi = true});
  ForwardArgs args = placed(call.args, kBase);
  args.alibi_slopes = ConstTensor::of<const float>(std::span(slopes), {8});
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const Plan plan = fulgur::plan(args, call.options);
  plan.run(args, run);
  const int* const of_stream = params<UploadMetadataParams>(0).to;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    slopes[7] = static_cast<float>(i);
    plan.run(args, run);
    const auto store = params<UploadMetadataParams>(state_->launches.size() - 2);
    EXPECT_NE(store.to, of_stream);
    EXPECT_EQ(stored_floats(store)[7], static_cast<float>(i));
  }
  state_->capturing = nullptr;
  state_->destroy_graph();
  EXPECT_EQ(state_->unsafe_in_capture, 0);
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

TEST_F(OnFakeGpu, PlansTellDecisionsAndRejections) {
  const ForwardCall call = forward_call({.sq = 16384, .sk = 16384, .mask = causal()});
  const Plan plan = fulgur::plan(call.args, call.options);
  const Details details = plan.details();
  EXPECT_EQ(details.get<std::string>("engine"), "cuda");
  EXPECT_EQ(details.get<std::string>("kernel"), "sm90_forward");
  EXPECT_EQ(details.get<std::string>("tile_from"), "cost_model");
  EXPECT_EQ(details.get<int64_t>("Bc"), plan.tiles().Bc);
  EXPECT_GT(details.get<int64_t>("ctas"), 0);
  EXPECT_TRUE(rejects(details, "engine cpu: "));
  EXPECT_TRUE(rejects(details, "tile sm90_forward "));
  const std::string text = plan.explain();
  for (const char* name : {"cuda", "Fake GPU", "16384", "causal"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name << "\n" << text;
  }
}

// Kernels are told where the numbers of dropout come from, and of what kind it is.
TEST_F(OnFakeGpu, DropoutReachesTheKernels) {
  ForwardCall call = forward_call({.lse = false, .dropout = 0.25});
  call.args = placed(call.args, kBase);
  const auto of = [&](const fulgur::Run& run) {
    state_->launches.clear();
    fulgur::plan(call.args, call.options).run(call.args, run);
    return params<ForwardParams>(0);
  };
  const ForwardParams by_run = of({.dropout_seed = 1, .dropout_offset = ~uint64_t{0}});
  EXPECT_EQ(by_run.rng_state, nullptr);
  EXPECT_EQ(by_run.dropout_seed, 1u);
  EXPECT_EQ(by_run.dropout_offset, ~0ull);
  EXPECT_EQ(by_run.dropout_threshold, 0x40000000u);
  EXPECT_FLOAT_EQ(by_run.keep_scale, 1 / 0.75f);
  call.args.rng_state =
      Tensor::contiguous(reinterpret_cast<void*>(kBase), DType::kI64, {2}, {DeviceType::kCuda, 0});
  const void* const state = of({}).rng_state;
  EXPECT_EQ(state, call.args.rng_state.data);

  BackwardCall gradient = backward_call({.mask = causal(), .dropout = 0.25});
  gradient.args = placed(gradient.args, kBase);
  gradient.args.rng_state = call.args.rng_state;
  state_->launches.clear();
  fulgur::plan(gradient.args, gradient.options).run(gradient.args);
  ASSERT_GE(state_->launches.size(), 4u);
  for (size_t i = 0; i < state_->launches.size(); ++i) {
    const auto p = params<BackwardParams>(i);
    EXPECT_EQ(static_cast<const void*>(p.rng_state), call.args.rng_state.data);
    EXPECT_EQ(p.dropout_threshold, 0x40000000u);
    EXPECT_FLOAT_EQ(p.keep_scale, 1 / 0.75f);
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
  const BackwardCall wide = backward_call({.d = 512});
  EXPECT_NE(message_of([&] {
              plan(wide.args, wide.options);
            }).find("engine cuda: computes d and dv up to 256"),
            std::string::npos);
  ForwardCall call = forward_call({});
  call.args.q.device.index = call.args.k.device.index = call.args.v.device.index = 3;
  call.args.out.device.index = call.args.lse.device.index = 3;
  EXPECT_NE(message_of([&] { plan(call.args, call.options); }).find("cuda:3"), std::string::npos);
}

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
  /// Of the kernel that a plan launches.
  Tile launched(const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    fulgur::forward(placed(call.args, kBase), call.options);
    return tile(state_->launches.size() - 1);
  }
};

std::vector<cuda::HopperForwardTile> tiles_of(const ForwardShape& shape) {
  std::vector<std::string> rejected;
  return cuda::forward_candidates(forward_problem(shape), {}, &rejected);
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
  refused({.dtype = DType::kF32}, Status::kUnsupported, "engine cuda: computes bf16 and f16");
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

/// A process of its own, whose cache folder has what it compiled itself.
class Prewarmed : public OnFakeGpu {
 protected:
  static void SetUpTestSuite() {
    std::error_code none;
    std::filesystem::remove_all(cuda::CacheFolder::standard().path(), none);
  }
  static std::ptrdiff_t kernels() {
    const auto files = std::filesystem::directory_iterator(cuda::CacheFolder::standard().path());
    return std::count_if(begin(files), end(files),
                         [](const auto& entry) { return entry.path().extension() == ".cubin"; });
  }
};

// Lengths and batches of every kind, also where the mask binds in long calls only.
TEST_F(Prewarmed, ForwardPlansCompileNothing) {
  std::mt19937_64 random(1);
  for (const Mask& mask : {causal(), window(100, 20)}) {
    // Made for a call of one row, whose strides say nothing of calls with more.
    const ForwardShape shape{.batch = 1, .sq = 1, .sk = 1, .d = 72, .mask = mask};
    const ForwardCall call = forward_call(shape);
    const cuda::Prewarmed first = cuda::prewarm(call.args, call.options);
    EXPECT_GT(first.compiled + first.present, 0);
    const auto before = kernels();
    for (int round = 0; round < 100; ++round) {
      const auto length = [&] { return 1 + static_cast<int64_t>(random() % (1 << random() % 16)); };
      ForwardShape other = shape;
      other.batch = 1 + static_cast<int64_t>(random() % (round % 10 == 0 ? 60 : 5));
      other.sq = length();
      other.sk = length();
      const ForwardCall later = forward_call(other);
      state_->launches.clear();
      fulgur::forward(placed(later.args, kBase), later.options);
      EXPECT_FALSE(state_->launches.empty());
      ASSERT_EQ(kernels(), before) << other.batch << " x " << other.sq << " x " << other.sk;
    }
  }
}

/// A causal call over pages of 16 keys, and with prefixes of one group of all sequences.
ForwardCall call_over_pages(int64_t batch, int64_t sq, int64_t sk, bool prefixes) {
  ForwardCall call = forward_call(
      {.batch = batch, .sq = sq, .sk = sk, .hq = 32, .hk = 8, .mask = causal(), .seqused = true});
  ForwardArgs& args = call.args;
  const auto tensor = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(nullptr, dtype, shape, {DeviceType::kCuda, 0});
  };
  const int64_t pages = (sk + 15) / 16;
  args.k = args.v = tensor(DType::kBF16, {batch * pages, 16, 8, 128});
  args.cache.page_table = tensor(DType::kI32, {batch, pages});
  if (prefixes) args.shared_prefix.prefix_groups = tensor(DType::kI32, {2});
  if (prefixes) args.shared_prefix.prefix_lens = tensor(DType::kI32, {1});
  return call;
}

// Grouped heads, and the parts of calls that share prefixes, too.
TEST_F(Prewarmed, CallsOverPagesCompileNothing) {
  for (const bool prefixes : {false, true}) {
    const ForwardCall call = call_over_pages(1, 1, 512, prefixes);
    EXPECT_GT(cuda::prewarm(call.args, call.options).compiled, 0);
    const auto before = kernels();
    std::set<size_t> launches;
    for (const int64_t batch : {1, 2, 3, 5, 8, 12, 16, 24, 32, 64, 200}) {
      for (const auto& [sq, sk] :
           {std::pair{1, 16}, {1, 9000}, {4, 9000}, {16, 4000}, {700, 700}}) {
        const ForwardCall later = call_over_pages(batch, sq, sk, prefixes);
        ForwardArgs args = placed(later.args, kBase);
        for (ConstTensor* t : {&args.cache.page_table, &args.shared_prefix.prefix_groups,
                               &args.shared_prefix.prefix_lens}) {
          if (t->given()) t->data = args.k.data;
        }
        state_->launches.clear();
        fulgur::forward(args, later.options);
        launches.insert(state_->launches.size());
        EXPECT_EQ(kernels(), before) << batch << " x " << sq << " x " << sk << prefixes;
      }
    }
    EXPECT_EQ(*launches.rbegin() > 3, prefixes);  // divided, two passes, merged
  }
}

// Wherever lengths and slopes lie.
TEST_F(Prewarmed, NumbersOfTheHostCompileNothing) {
  const ForwardCall there =
      forward_call({.hq = 2, .hk = 2, .d = 64, .packed = true, .seqused_q = true, .seqused = true});
  cuda::prewarm(there.args, there.options);
  const auto before = kernels();
  const CallWithHostLengths here(7);
  fulgur::forward(placed(here.call.args, kBase), here.call.options);
  EXPECT_FALSE(state_->launches.empty());
  EXPECT_EQ(kernels(), before);
}

TEST_F(Prewarmed, SlopesAndSinksOfTheHostCompileNothing) {
  for (const bool alibi : {false, true}) {
    const ForwardCall call =
        forward_call({.hq = 2, .hk = 2, .d = 64, .alibi = alibi, .sinks = !alibi});
    cuda::prewarm(call.args, call.options);
    const auto before = kernels();
    std::vector<float> numbers(2);
    ForwardArgs args = placed(call.args, kBase);
    (alibi ? args.alibi_slopes : args.sinks) =
        ConstTensor::of<const float>(std::span(numbers), {2});
    state_->launches.clear();
    fulgur::forward(args, call.options);
    EXPECT_EQ(state_->launches.size(), 2u);
    EXPECT_EQ(kernels(), before);
  }
}

// Odd dims are copied, and their gradients stored by elements; the mask binds in long calls only,
// and then what it hides is repaired.
TEST_F(Prewarmed, BackwardPlansCompileNothing) {
  for (const bool deterministic : {false, true}) {
    const ForwardShape shape{.batch = 1, .sq = 1, .sk = 1, .d = 12, .mask = window(-1, 30)};
    const BackwardCall call = backward_call(shape, {.deterministic = deterministic});
    const cuda::Prewarmed first = cuda::prewarm(call.args, call.options);
    EXPECT_GT(first.compiled + first.present, 4);
    const auto before = kernels();
    for (const int64_t batch : {1, 3, 300}) {
      for (const auto& [sq, sk] : {std::pair{1, 1}, {16, 900}, {40, 7}, {5000, 5000}}) {
        ForwardShape other = shape;
        other.batch = batch;
        other.sq = sq;
        other.sk = sk;
        const BackwardCall later = backward_call(other, {.deterministic = deterministic});
        state_->launches.clear();
        fulgur::backward(placed(later.args, kBase), later.options);
        EXPECT_FALSE(state_->launches.empty());
        EXPECT_EQ(kernels(), before) << batch << " " << sq << " " << sk;
      }
    }
    const cuda::Prewarmed again = cuda::prewarm(call.args, call.options);
    EXPECT_EQ(again.compiled, 0);
    EXPECT_EQ(again.present, first.compiled + first.present);
  }
}

/// A process of its own, whose kernels of some tile spill: a copy of the device text, to which a
/// kernel that needs more registers than it may have is added.
class Spills : public OnFakeGpu {
 protected:
  static void SetUpTestSuite() {
    namespace fs = std::filesystem;
    const fs::path folder = fs::temp_directory_path() / fmt::format("fulgur_spills_{}", getpid());
    fs::copy(FULGUR_KERNELS, folder, fs::copy_options::recursive);
    std::ofstream(folder / "sm90/forward/forward.cu", std::ios::app)
        << "extern \"C\" __global__ void __launch_bounds__(1024, 2) spilling(volatile float* x) {\n"
           "  if (kConsumers != 3) return;\n"
           "  float y[64];\n"
           "  for (int i = 0; i < 64; ++i) y[i] = x[i];\n"
           "  for (int i = 0; i < 64; ++i) x[i] = y[i] + y[63 - i];\n"
           "}\n";
    setenv("FULGUR_KERNEL_DIR", folder.c_str(), 1);
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(getenv("FULGUR_KERNEL_DIR")); }
};

TEST_F(Spills, PlansTakeTheNextTileAndSaySo) {
  const ForwardCall call = forward_call({.batch = 8, .sq = 4096, .sk = 4096});
  const Plan plan = fulgur::plan(call.args, call.options);
  const Details details = plan.details();
  EXPECT_EQ(details.get<int64_t>("warpgroups"), 2);
  EXPECT_FALSE(details.has("kernel_defect"));
  EXPECT_TRUE(rejects(details, "tile sm90_forward 192 x 64: ", "spills"));
  EXPECT_TRUE(rejects(details, "tile sm90_forward 192 x 80: ", "spills"));
  plan.run(placed(call.args, kBase));
  EXPECT_EQ(state_->launches.at(0).block, 384u);
}

// The tile of an invariant call does not depend on what the compiler makes of it.
TEST_F(Spills, InvariantPlansKeepTheirTile) {
  const ForwardCall call = forward_call({.batch = 8, .sq = 4096, .sk = 4096, .invariant = true});
  const Details details = fulgur::plan(call.args, call.options).details();
  EXPECT_EQ(details.get<int64_t>("warpgroups"), 3);
  EXPECT_TRUE(details.has("kernel_defect"));
}

// Where every tile spills, the first is taken, and that is said.
TEST_F(Spills, ThereMayBeNoBetterTile) {
  const ForwardCall call = forward_call({.batch = 8, .sq = 4096, .sk = 4096, .d = 32});
  const Details details = fulgur::plan(call.args, call.options).details();
  EXPECT_TRUE(details.get<std::string>("kernel_defect").starts_with("spills "));
}

/// A cache of 20 pages of 16 rows and packed new rows of 3 sequences, on the "device".
AppendArgs append_args(DType dtype) {
  constexpr Device kDevice{DeviceType::kCuda, 0};
  std::uintptr_t at = 0x7f0000000000;
  const auto tensor = [&](DType type, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(reinterpret_cast<void*>(at += 0x100000000), type, shape, kDevice);
  };
  return {.rows = {.k_cache = tensor(dtype, {20, 16, 2, 64}),
                   .v_cache = tensor(dtype, {20, 16, 2, 128}),
                   .k_new = tensor(dtype, {50, 2, 64}),
                   .v_new = tensor(dtype, {50, 2, 128}),
                   .cu_seqlens_k_new = tensor(DType::kI32, {4}),
                   .cache_seqlens = tensor(DType::kI32, {3}),
                   .rotary = {.cos = tensor(DType::kF32, {1000, 16}),
                              .sin = tensor(DType::kF32, {1000, 16})}},
          .cache = {.page_table = tensor(DType::kI32, {3, 7})},
          .q = tensor(dtype, {60, 8, 64}),
          .q_out = tensor(dtype, {60, 8, 64}),
          .cu_seqlens_q = tensor(DType::kI32, {4})};
}

void expect_rows(const AppendRows& rows, const ConstTensor& from, const ConstTensor& to,
                 int pairs) {
  const int row = from.rank - 3;
  EXPECT_EQ(rows.from, from.data);
  EXPECT_EQ(rows.from_batch, row == 0 ? 0 : from.strides[0]);
  EXPECT_EQ(rows.from_row, from.strides[row]);
  EXPECT_EQ(rows.from_head, from.strides[row + 1]);
  EXPECT_EQ(rows.to, to.data);
  EXPECT_EQ(rows.to_batch, to.rank == 3 ? 0 : to.strides[0]);
  EXPECT_EQ(rows.to_row, to.strides[to.rank - 3]);
  EXPECT_EQ(rows.to_head, to.strides[to.rank - 2]);
  EXPECT_EQ(rows.heads, from.shape[row + 1]);
  EXPECT_EQ(rows.dim, from.shape[row + 2]);
  EXPECT_EQ(rows.pairs, pairs);
}

TEST_F(OnFakeGpu, AppendLaunchesOnce) {
  const AppendArgs args = append_args(DType::kBF16);
  void* const stream = reinterpret_cast<void*>(0x1230);
  append(args, {.mask = causal(), .engine = "cuda"}, {.stream = stream});
  ASSERT_EQ(state_->launches.size(), 1u);
  const FakeLaunch& launch = state_->launches[0];
  EXPECT_STREQ(launch.kernel, "fulgur_append");
  EXPECT_EQ(launch.stream, stream);
  EXPECT_EQ(launch.grid, 110u);   // tokens and queries
  EXPECT_EQ(launch.block, 128u);  // 8 heads of 16 lanes
  EXPECT_EQ(launch.grid_y, 1u);
  const auto p = params<AppendParams>(0);
  expect_rows(p.k, args.rows.k_new, args.rows.k_cache, 16);
  expect_rows(p.v, args.rows.v_new, args.rows.v_cache, 0);
  expect_rows(p.q, args.q, args.q_out, 16);
  EXPECT_EQ(p.tokens.count, 50);
  EXPECT_EQ(p.tokens.cu_seqlens, args.rows.cu_seqlens_k_new.data);
  EXPECT_EQ(p.queries.count, 60);
  EXPECT_EQ(p.queries.cu_seqlens, args.cu_seqlens_q.data);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.cache_seqlens, args.rows.cache_seqlens.data);
  EXPECT_EQ(p.first_positions, args.rows.cache_seqlens.data);
  EXPECT_EQ(p.page_table, args.cache.page_table.data);
  EXPECT_EQ(p.page_indptr, nullptr);
  EXPECT_EQ(p.cache_batch_idx, nullptr);
  EXPECT_EQ(p.table_stride, 7);
  EXPECT_EQ(p.ids, 7);
  EXPECT_EQ(p.room, 7 * 16);
  EXPECT_EQ(p.entries, 20);
  EXPECT_EQ(p.page, 16u);
  EXPECT_EQ(p.cos, args.rows.rotary.cos.data);
  EXPECT_EQ(p.sin, args.rows.rotary.sin.data);
  EXPECT_EQ(p.cos_row, 16);
  EXPECT_EQ(p.sin_row, 16);
  EXPECT_EQ(p.positions, 1000);
  EXPECT_EQ(p.f32_angles, 1);
  EXPECT_EQ(p.interleaved, 0);
  EXPECT_EQ(p.advance, 1);
  EXPECT_EQ(p.wide, 1);
  EXPECT_EQ(1 << p.lanes_log2, 16);  // 128 columns, 8 a lane
}

TEST_F(OnFakeGpu, AppendToRowsOfTheBatch) {
  AppendArgs args = append_args(DType::kF16);
  const auto batched = [](auto t, std::initializer_list<int64_t> shape) {
    return decltype(t)::contiguous(t.data, t.dtype, shape, t.device);
  };
  args.rows.cu_seqlens_k_new = args.cu_seqlens_q = args.cache.page_table = {};
  args.rows.k_new = batched(args.rows.k_new, {3, 2, 2, 64});
  args.rows.v_new = batched(args.rows.v_new, {3, 2, 2, 128});
  args.q = batched(args.q, {3, 5, 8, 64});
  args.q_out = batched(args.q_out, {3, 5, 8, 64});
  args.cache.cache_batch_idx = args.rows.cache_seqlens;
  args.rows.rotary.rotary_seqlens = batched(args.rows.cache_seqlens, {3});
  args.rows.rotary.rotary_seqlens.data = reinterpret_cast<void*>(kBase);
  args.rows.rotary.interleaved = true;
  append(args);
  const auto p = params<AppendParams>(0);
  expect_rows(p.k, args.rows.k_new, args.rows.k_cache, 16);
  expect_rows(p.q, args.q, args.q_out, 16);
  EXPECT_EQ(p.tokens.count, 6);
  EXPECT_EQ(p.tokens.each, 2);
  EXPECT_EQ(p.tokens.cu_seqlens, nullptr);
  EXPECT_EQ(p.queries.count, 15);
  EXPECT_EQ(p.queries.each, 5);
  EXPECT_EQ(p.page_table, nullptr);
  EXPECT_EQ(p.cache_batch_idx, args.cache.cache_batch_idx.data);
  EXPECT_EQ(p.first_positions, args.rows.rotary.rotary_seqlens.data);
  EXPECT_EQ(p.room, 16);
  EXPECT_EQ(p.entries, 20);
  EXPECT_EQ(p.interleaved, 1);
  EXPECT_EQ(p.advance, 0);
}

// What does not lie at multiples of 16 bytes is moved element by element.
TEST_F(OnFakeGpu, AppendMovesSixteenBytesWhereItCan) {
  const auto wide = [&](auto change) {
    AppendArgs args = append_args(DType::kBF16);
    change(args);
    append(args);
    return params<AppendParams>(state_->launches.size() - 1).wide;
  };
  const auto moved = [](auto* data, int bytes) {
    return reinterpret_cast<decltype(data)>(reinterpret_cast<std::uintptr_t>(data) + bytes);
  };
  EXPECT_EQ(wide([](AppendArgs&) {}), 1);
  EXPECT_EQ(wide([](AppendArgs& a) {
              a.q_out = {};
              a.rows.rotary.cos = a.rows.rotary.sin = a.q = a.cu_seqlens_q = {};
            }),
            1);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.k_cache.strides[0] += 4; }), 0);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.v_new.strides[1] += 2; }), 0);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.rotary.cos.strides[0] += 2; }), 0);
  EXPECT_EQ(
      wide([](AppendArgs& a) { a.rows.rotary.sin.shape[1] = a.rows.rotary.cos.shape[1] = 12; }), 0);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.v_cache.shape[3] = a.rows.v_new.shape[2] = 100; }), 0);
  EXPECT_EQ(wide([&](AppendArgs& a) { a.q.data = moved(a.q.data, 8); }), 0);
  EXPECT_EQ(wide([&](AppendArgs& a) { a.rows.v_cache.data = moved(a.rows.v_cache.data, 2); }), 0);
  EXPECT_EQ(wide([&](AppendArgs& a) { a.rows.rotary.sin.data = moved(a.rows.rotary.sin.data, 4); }),
            0);
}

// Few new rows go to the cache by the kernel that attends them, and queries to the workspace.
TEST_F(OnFakeGpu, FewRowsAreAppendedWhereTheyAreRead) {
  const AppendingCall c({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
  const Plan plan = fulgur::plan(c.call.args, c.call.options);
  const Details details = plan.details();
  EXPECT_EQ(details.get<std::string>("append"), "by_attention_kernel");
  EXPECT_EQ(details.get<int64_t>("call.append_tokens"), 3);
  EXPECT_EQ(details.get<int64_t>("call.sk"), 512);  // of whole pages
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const WorkspaceNeed need = plan.workspace();
  plan.run(c.call.args, {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_decode");
  const auto p = params<DecodeAppendParams>(0);
  EXPECT_EQ(static_cast<const void*>(p.k.data), c.call.args.append.k_cache.data);
  EXPECT_EQ(static_cast<const void*>(p.v.data), c.call.args.append.v_cache.data);
  EXPECT_EQ(p.pages.table, c.call.args.cache.page_table.data);
  const Tensor turned = Tensor::contiguous(p.q.data, DType::kBF16, {3, 1, 8, 128});
  EXPECT_EQ(p.append.k.from, c.call.args.append.k_new.data);
  EXPECT_EQ(p.append.k.to, c.call.args.append.k_cache.data);
  EXPECT_EQ(p.append.k.pairs, 32);
  EXPECT_EQ(p.append.v.from, c.call.args.append.v_new.data);
  EXPECT_EQ(p.append.v.to, c.call.args.append.v_cache.data);
  EXPECT_EQ(p.append.v.pairs, 0);
  EXPECT_EQ(p.append.q.from, c.call.args.q.data);
  EXPECT_EQ(p.append.q.to, turned.data);
  EXPECT_EQ(p.append.cache_seqlens, c.call.args.append.cache_seqlens.data);
  EXPECT_EQ(p.append.tokens.each, 1);
  EXPECT_EQ(p.append.lengths, nullptr);
  EXPECT_EQ(p.append.advance, 1);
  expect_apart({{turned.data, turned.numel() * 2}}, mine + need.zeroed_bytes,
               need.bytes - need.zeroed_bytes);
  EXPECT_EQ(p.q.head, 128);
}

// Elsewhere they go there first, and lengths are added up on the way.
TEST_F(OnFakeGpu, ManyRowsAreAppendedFirst) {
  struct Why {
    ForwardShape shape;
    int64_t fresh;
    std::string kernel, family;
  };
  for (const Why& w :
       {Why{{.batch = 3, .sq = 1024, .mask = causal()}, 0, "fulgur_forward", "sm90_forward"},
        Why{{.batch = 64, .sq = 1, .sk = 8192}, 300, "fulgur_decode", "sm90_decode"}}) {
    state_->launches.clear();
    const AppendingCall c(w.shape, w.fresh);
    const Plan plan = fulgur::plan(c.call.args, c.call.options);
    const Details details = plan.details();
    EXPECT_EQ(details.get<std::string>("append"), "before_attention");
    EXPECT_EQ(details.get<std::string>("kernel"), w.family);
    EXPECT_TRUE(rejects(details, "append by the kernel that attends: "));
    auto* const mine = reinterpret_cast<char*>(2 * kBase);
    const WorkspaceNeed need = plan.workspace();
    plan.run(c.call.args, {.workspace = {mine, need.bytes}});
    ASSERT_EQ(state_->launches.size(), 2u);
    EXPECT_STREQ(state_->launches[0].kernel, "fulgur_append");
    EXPECT_EQ(state_->launches[1].kernel, w.kernel);
    const auto p = params<AppendParams>(0);
    EXPECT_EQ(p.q.from, c.call.args.q.data);
    expect_apart({{p.q.to, c.call.args.q.numel() * 2}, {p.lengths, w.shape.batch * 4}},
                 mine + need.zeroed_bytes, need.bytes - need.zeroed_bytes);
    if (w.kernel == "fulgur_decode") {
      EXPECT_EQ(params<DecodeParams>(1).q.data, p.q.to);
      EXPECT_EQ(params<DecodeParams>(1).seqused_k, p.lengths);
    } else {
      EXPECT_EQ(params<ForwardParams>(1).seqused_k, p.lengths);
    }
  }
}

TEST_F(OnFakeGpu, AppendOfNothingLaunchesNothing) {
  AppendArgs args = append_args(DType::kBF16);
  args.rows.k_new.shape[0] = args.rows.v_new.shape[0] = args.q.shape[0] = args.q_out.shape[0] = 0;
  append(args);
  EXPECT_TRUE(state_->launches.empty());
}

/// The same with its lengths in arrays of the host.
struct AppendOfHostLengths {
  std::vector<int32_t> cu_new = {0, 20, 20, 50}, old = {5, 9, 0}, first = {7, 0, 3};
  std::vector<int32_t> cu_q = {0, 30, 40, 60};
  AppendArgs args;

  explicit AppendOfHostLengths(DType dtype) : args(append_args(dtype)) {
    args.rows.cu_seqlens_k_new = ConstTensor::of<const int32_t>(std::span(cu_new), {4});
    args.rows.cache_seqlens = ConstTensor::of<const int32_t>(std::span(old), {3});
    args.rows.rotary.rotary_seqlens = ConstTensor::of<const int32_t>(std::span(first), {3});
    args.cu_seqlens_q = ConstTensor::of<const int32_t>(std::span(cu_q), {4});
  }
};

std::vector<int> stored(const UploadMetadataParams& store) {
  return {store.numbers, store.numbers + store.count};
}

// Its two kernels must be there before a capture, or nothing becomes part of it.
TEST_F(OnFakeGpu, CapturedAppendsOfHostLengthsHaveTheMemoryOfTheirGraph) {
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  append(append_args(DType::kF16), {}, run);
  AppendOfHostLengths c(DType::kF16);
  state_->launches.clear();
  state_->capturing = run.stream;
  EXPECT_EQ(message_of([&] { append(c.args, {}, run); }),
            "stream: is being captured, and this is the first launch of fulgur_upload_metadata on "
            "the device, which loads it; make such a call before the capture");
  EXPECT_TRUE(state_->launches.empty());
  state_->capturing = nullptr;
  append(c.args, {}, run);
  const FakeState before = *state_;
  const int* const of_stream = params<UploadMetadataParams>(0).to;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    c.old[0] = i;
    append(c.args, {}, run);
    const auto store = params<UploadMetadataParams>(state_->launches.size() - 2);
    EXPECT_NE(store.to, of_stream);
    EXPECT_EQ(store.numbers[4], i);
  }
  state_->capturing = nullptr;
  state_->destroy_graph();
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->unsafe_in_capture, before.unsafe_in_capture);
}

// Lengths of the host go ahead of both kernels; what is wrong about them is said before.
TEST_F(OnFakeGpu, RowsOfHostLengthsAreAppendedFirst) {
  AppendingCall c({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
  std::vector<int32_t> old = {5, 0, 511};
  c.call.args.append.cache_seqlens = ConstTensor::of<const int32_t>(std::span(old), {3});
  fulgur::forward(c.call.args, c.call.options);
  ASSERT_EQ(state_->launches.size(), 3u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_upload_metadata");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_append");
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_decode");
  EXPECT_EQ(params<AppendParams>(1).cache_seqlens, params<UploadMetadataParams>(0).to);
  EXPECT_EQ(params<DecodeParams>(2).seqused_k, params<AppendParams>(1).lengths);
  EXPECT_EQ(fulgur::plan(c.call.args, c.call.options).details().get<std::string>("append"),
            "before_attention");
  old[2] = 512;
  state_->launches.clear();
  EXPECT_EQ(message_of([&] { fulgur::forward(c.call.args, c.call.options); }),
            "cache_seqlens: got 512 at 2, with 1 new rows 513, want at most the 512 of its cache");
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(OnFakeGpu, AppendStoresLengthsOfTheHost) {
  AppendOfHostLengths c(DType::kBF16);
  void* const stream = reinterpret_cast<void*>(0x1230);
  append(c.args, {}, {.stream = stream});
  for (auto* const lengths : {&c.cu_new, &c.old, &c.first, &c.cu_q}) lengths->assign(3, -1);
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_upload_metadata");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_append");
  for (const FakeLaunch& launch : state_->launches) EXPECT_EQ(launch.stream, stream);
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored(store), (std::vector{0, 20, 20, 50, 5, 9, 0, 7, 0, 3, 0, 30, 40, 60}));
  // After what every launch leaves zero.
  const auto lease = cuda::Gpu::at(0).launch_memory().take(static_cast<cuda::CUstream>(stream), 1);
  EXPECT_GE(reinterpret_cast<char*>(store.to), lease.data + cuda::LaunchMemory::kZeroed);
  const auto p = params<AppendParams>(1);
  EXPECT_EQ(p.tokens.cu_seqlens, store.to);
  EXPECT_EQ(p.cache_seqlens, store.to + 4);
  EXPECT_EQ(p.first_positions, store.to + 7);
  EXPECT_EQ(p.queries.cu_seqlens, store.to + 10);
  EXPECT_EQ(p.page_table, c.args.cache.page_table.data);
  expect_rows(p.k, c.args.rows.k_new, c.args.rows.k_cache, 16);
}

// Each of them may lie on the device, where it is not looked at.
TEST_F(OnFakeGpu, AppendStoresSomeLengthsOfTheHost) {
  AppendOfHostLengths c(DType::kBF16);
  const AppendArgs there = append_args(DType::kBF16);
  c.args.rows.cu_seqlens_k_new = there.rows.cu_seqlens_k_new;
  c.args.cu_seqlens_q = there.cu_seqlens_q;
  c.args.rows.rotary.rotary_seqlens = {};
  append(c.args);
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored(store), (std::vector{5, 9, 0}));
  const auto p = params<AppendParams>(1);
  EXPECT_EQ(p.cache_seqlens, store.to);
  EXPECT_EQ(p.first_positions, store.to);
  EXPECT_EQ(p.tokens.cu_seqlens, there.rows.cu_seqlens_k_new.data);
  EXPECT_EQ(p.queries.cu_seqlens, there.cu_seqlens_q.data);
  c.old[1] = 113;
  EXPECT_EQ(message_of([&] { append(c.args); }),
            "cache_seqlens: got 113 at 1, with 0 new rows 113, want at most the 112 of its cache");
  EXPECT_EQ(state_->launches.size(), 2u);
}

TEST_F(OnFakeGpu, WrongLengthsOfTheHostAppendNothing) {
  const auto said = [](auto change) {
    AppendOfHostLengths c(DType::kBF16);
    change(c);
    return message_of([&] { append(c.args); });
  };
  using Call = AppendOfHostLengths;
  EXPECT_EQ(said([](Call& c) { c.cu_q[0] = -1; }), "cu_seqlens_q: starts with -1, want >= 0");
  EXPECT_EQ(said([](Call& c) { c.cu_q[3] = 61; }),
            "cu_seqlens_q: ends with 61, want at most 60 (rows of q)");
  EXPECT_EQ(said([](Call& c) { c.cu_new[2] = 19; }),
            "cu_seqlens_k_new: decreases at 2: 19 after 20, want non-decreasing");
  EXPECT_EQ(said([](Call& c) { c.cu_new[3] = 51; }),
            "cu_seqlens_k_new: ends with 51, want at most 50 (rows of k_new)");
  EXPECT_EQ(said([](Call& c) { c.old[2] = -1; }), "cache_seqlens: got -1 at 2, want >= 0");
  EXPECT_EQ(said([](Call& c) { c.old[2] = 83; }),
            "cache_seqlens: got 83 at 2, with 30 new rows 113, want at most the 112 of its cache");
  EXPECT_EQ(said([](Call& c) { c.first[0] = -1; }), "rotary_seqlens: got -1 at 0, want >= 0");
  EXPECT_EQ(said([](Call& c) { c.first[0] = 981; }),
            "cos: got 1000 positions, want 1001 for sequence 0, which has 20 from 981 on");
  EXPECT_EQ(said([](Call& c) {
              c.args.rows.cache_seqlens.device = {DeviceType::kCuda, 1};
            }),
            "cache_seqlens: on cuda:1, want cuda:0 as k_cache, or cpu");
  EXPECT_EQ(said([](Call& c) { c.args.cache.page_table.device = {}; }),
            "page_table: on cpu, want cuda:0 as k_cache");
  EXPECT_TRUE(state_->launches.empty());
}

/// What merge takes: parts of (2, 5, 3, dim), the second one in f32.
struct MergeCallOnGpu {
  std::vector<Partial> parts;
  Merged result;

  MergeCallOnGpu(int count, int64_t dim) {
    constexpr Device kDevice{DeviceType::kCuda, 0};
    std::uintptr_t at = 0x7f0000000000;
    const auto tensor = [&](DType type, std::initializer_list<int64_t> shape) {
      return Tensor::contiguous(reinterpret_cast<void*>(at += 0x100000), type, shape, kDevice);
    };
    for (int i = 0; i < count; ++i) {
      parts.push_back({tensor(i == 1 ? DType::kF32 : DType::kBF16, {2, 5, 3, dim}),
                       tensor(DType::kF32, {2, 3, 5})});
    }
    result = {tensor(DType::kF16, {2, 5, 3, dim}), tensor(DType::kF32, {2, 3, 5})};
  }
};

TEST_F(OnFakeGpu, MergeLaunchesOnce) {
  const MergeCallOnGpu call(64, 128);
  void* const stream = reinterpret_cast<void*>(0x1230);
  merge(call.parts, call.result, {.stream = stream});
  ASSERT_EQ(state_->launches.size(), 1u);
  const FakeLaunch& launch = state_->launches[0];
  EXPECT_STREQ(launch.kernel, "fulgur_merge");
  EXPECT_EQ(launch.stream, stream);
  EXPECT_EQ(launch.grid, 10u);
  EXPECT_EQ(launch.block, 64u);  // 3 heads of 16 lanes
  const auto p = params<MergeParams>(0);
  EXPECT_LE(sizeof(p), 4096u);
  const auto expect_tensors = [](const MergeTensors& t, const ConstTensor& out, const void* lse) {
    EXPECT_EQ(t.out, out.data);
    EXPECT_EQ(t.lse, lse);
    EXPECT_EQ(t.batch, 5 * 3 * 128);
    EXPECT_EQ(t.row, 3 * 128);
    EXPECT_EQ(t.head, 128);
    EXPECT_EQ(t.lse_batch, 15);
    EXPECT_EQ(t.lse_head, 5);
  };
  expect_tensors(p.to, call.result.out, call.result.lse.data);
  for (int i = 0; i < 64; ++i) {
    expect_tensors(p.from[i], call.parts[i].out, call.parts[i].lse.data);
    EXPECT_EQ(p.types[i], static_cast<int>(i == 1 ? DType::kF32 : DType::kBF16));
  }
  EXPECT_EQ(p.type, static_cast<int>(DType::kF16));
  EXPECT_EQ(p.parts, 64);
  EXPECT_EQ(p.tokens, 10);
  EXPECT_EQ(p.rows, 5);
  EXPECT_EQ(p.heads, 3);
  EXPECT_EQ(p.dim, 128);
  EXPECT_EQ(p.wide, 1);
  EXPECT_EQ(1 << p.lanes_log2, 16);
}

TEST_F(OnFakeGpu, MergeByElements) {
  for (const int64_t dim : {1, 36, 100}) {
    const MergeCallOnGpu call(2, dim);
    merge(call.parts, {call.result.out, {}});
    const auto p = params<MergeParams>(state_->launches.size() - 1);
    EXPECT_EQ(p.wide, 0);
    EXPECT_EQ(p.to.lse, nullptr);
    EXPECT_EQ(1 << p.lanes_log2, dim == 1 ? 8 : 32);
  }
  MergeCallOnGpu call(2, 64);
  call.parts[1].out.data = static_cast<const char*>(call.parts[1].out.data) + 4;
  merge(call.parts, call.result);
  EXPECT_EQ(params<MergeParams>(state_->launches.size() - 1).wide, 0);
}

// A GPU that attention has no kernels for appends and merges all the same.
class OnOtherGpu : public OnFakeGpu {
 protected:
  void SetUp() override {}

  void append_and_merge(const char* capability) {
    setenv("FAKE_CUDA_CAPABILITY", capability, 1);
    if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
    find_state();
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) append(append_args(dtype));
    append(AppendOfHostLengths(DType::kBF16).args);
    const MergeCallOnGpu call(2, 64);
    merge(call.parts, call.result);
    ASSERT_EQ(state_->launches.size(), 6u);
    EXPECT_STREQ(state_->launches[0].kernel, "fulgur_append");
    EXPECT_STREQ(state_->launches[5].kernel, "fulgur_merge");
    const AppendingCall attends({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
    const auto forward = [&] { fulgur::forward(attends.call.args, attends.call.options); };
    EXPECT_EQ(status_of(forward), Status::kUnavailable);
    EXPECT_NE(message_of(forward).find("want 9.0 (Hopper) for attention"), std::string::npos);
    EXPECT_EQ(state_->launches.size(), 6u);
  }
};

TEST_F(OnOtherGpu, Ampere) { append_and_merge("80"); }
TEST_F(OnOtherGpu, Ada) { append_and_merge("89"); }
TEST_F(OnOtherGpu, Blackwell) { append_and_merge("100"); }
TEST_F(OnOtherGpu, GeForceBlackwell) { append_and_merge("120"); }
TEST_F(OnOtherGpu, ThatIsTooOld) {
  setenv("FAKE_CUDA_CAPABILITY", "75", 1);
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  EXPECT_EQ(message_of([] { append(append_args(DType::kF16)); }),
            "cuda:0 (Fake GPU) has compute capability 7.5; want 8.0 or more");
}

// Calls without a plan load their kernel once, allocate nothing, and cannot begin in a capture.
TEST_F(OnFakeGpu, CallsWithoutAPlanOnlyLaunch) {
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const AppendArgs args = append_args(DType::kF32);  // no other test of this process
  const AppendOfHostLengths here(DType::kF32);
  const auto call = [&] { append(args, {}, run); };
  append(AppendOfHostLengths(DType::kF16).args);  // the kernel that stores lengths is there
  state_->launches.clear();
  state_->capturing = run.stream;
  for (const AppendArgs& first : {args, here.args}) {
    EXPECT_EQ(message_of([&] { append(first, {}, run); }),
              "stream: is being captured, and this is the first launch of fulgur_append on the "
              "device, which loads it; make such a call before the capture");
  }
  EXPECT_EQ(status_of(call), Status::kInvalidArgument);
  EXPECT_TRUE(state_->launches.empty());
  state_->capturing = nullptr;
  call();
  const MergeCallOnGpu parts(2, 64);
  merge(parts.parts, parts.result, run);
  const FakeState before = *state_;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    call();
    merge(parts.parts, parts.result, run);
  }
  state_->capturing = nullptr;
  EXPECT_EQ(state_->launches.size(), before.launches.size() + 6);
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->allocated, before.allocated);
  EXPECT_EQ(state_->unsafe_in_capture, before.unsafe_in_capture);
}

TEST_F(OnFakeGpu, SizesThatCallsWithoutAPlanDoNotTake) {
  AppendArgs args = append_args(DType::kBF16);
  args.rows.k_new = ConstTensor::contiguous(args.rows.k_new.data, DType::kBF16, {1 << 30, 2, 64},
                                            args.rows.k_new.device);
  args.rows.k_new.strides[0] = 0;
  args.rows.v_new = ConstTensor::contiguous(args.rows.v_new.data, DType::kBF16, {1 << 30, 2, 128},
                                            args.rows.v_new.device);
  args.rows.v_new.strides[0] = 0;
  const auto call = [&] { append(args); };
  EXPECT_EQ(status_of(call), Status::kUnsupported);
  EXPECT_EQ(message_of(call),
            "k_new: got 1073741824 rows, append on cuda takes at most 1073741823");
  EXPECT_TRUE(state_->launches.empty());
}

// Appended by the kernel that attends or before it.
TEST_F(Prewarmed, CallsThatAppendCompileNothing) {
  const AppendingCall one({.batch = 1, .sq = 1, .sk = 512, .mask = causal()});
  EXPECT_GT(cuda::prewarm(one.call.args, one.call.options).compiled, 0);
  const auto before = kernels();
  std::set<std::string> first;
  for (const int64_t batch : {1, 3, 64}) {
    for (const auto& [sq, sk] : {std::pair{1, 16}, {1, 9000}, {4, 9000}, {16, 4000}, {700, 700}}) {
      const AppendingCall later({.batch = batch, .sq = sq, .sk = sk, .mask = causal()});
      state_->launches.clear();
      fulgur::forward(later.call.args, later.call.options);
      first.insert(state_->launches.at(0).kernel);
      EXPECT_EQ(kernels(), before) << batch << " x " << sq << " x " << sk;
    }
  }
  EXPECT_EQ(first, (std::set<std::string>{"fulgur_append", "fulgur_decode"}));
}

TEST_F(Prewarmed, AppendAndMergeCompileNothing) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const ForwardCall call = forward_call({.dtype = dtype, .d = 64});
    cuda::prewarm(call.args, call.options);
    const auto before = kernels();
    append(append_args(dtype));
    append(AppendOfHostLengths(dtype).args);
    const MergeCallOnGpu parts(3, 64);
    merge(parts.parts, parts.result);
    EXPECT_EQ(kernels(), before);
  }
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
