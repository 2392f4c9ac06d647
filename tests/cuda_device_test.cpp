// What only a GPU can show: split tiles, padded strides, graphs, streams, and the host's time.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

#include "cuda/cuda_engine.h"
#include "cuda/hopper_forward.h"
#include "engines.h"
#include "fulgur/cuda.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    for (const EngineInfo& engine : engines()) {
      if (engine.name == "cuda" && !engine.unavailable.empty()) {
        GTEST_SKIP() << "cuda: " << engine.unavailable;
      }
    }
  }
};

testing::AssertionResult right(const Case& c) {
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  w.run_forward();
  if (auto result = w.check_memory(); !result) return result;
  return forward_is_right(w, expect(w)) << " in " << c.name();
}

TEST_F(OnGpu, TilesSplitOverKeys) {
  const auto bf16 = DType::kBF16, f16 = DType::kF16;
  // Few tiles: all are split; then full waves of tiles and a split rest.
  EXPECT_TRUE(right({.dtype = bf16, .sq = 1, .sk = 9000, .hq = 8, .hk = 2, .d = 128, .dv = 128}));
  EXPECT_TRUE(right({.dtype = f16, .batch = 2, .sq = 1, .sk = 5001, .hq = 4, .hk = 1, .d = 64}));
  EXPECT_TRUE(
      right({.dtype = bf16, .sq = 3, .sk = 4000, .hq = 4, .d = 256, .dv = 256, .mask = causal()}));
  EXPECT_TRUE(right({.dtype = bf16,
                     .batch = 3,
                     .sq = 2,
                     .sk = 3000,
                     .hq = 2,
                     .d = 96,
                     .dv = 96,
                     .seqused = true}));
  EXPECT_TRUE(right(
      {.dtype = bf16, .batch = 10, .sq = 192, .sk = 700, .hq = 16, .hk = 4, .d = 32, .dv = 32}));
}

// Every head dim and the tiles they choose, in rows that the copy engine can address.
TEST_F(OnGpu, EveryHeadDim) {
  for (int64_t d = 8; d <= 256; d += 8) {
    const int64_t dv = d % 16 == 0 ? d : 264 - d;
    EXPECT_TRUE(right({.dtype = d % 3 == 0 ? DType::kF16 : DType::kBF16,
                       .batch = 2,
                       .sq = 300,
                       .sk = 333,
                       .hq = 2,
                       .d = d,
                       .dv = dv,
                       .mask = d % 5 == 0 ? full() : causal()}));
  }
}

/// A copy of a contiguous tensor in device memory.
class Copied {
 public:
  explicit Copied(const Tensor& host) : host_(host), device_(host) {
    device_.data = cuda::allocate(bytes());
    device_.device = {DeviceType::kCuda, 0};
    cuda::copy(device_.data, host.data, bytes());
  }
  ~Copied() { cuda::deallocate(device_.data); }
  Copied(const Copied&) = delete;
  operator const Tensor&() const { return device_; }
  void bring_back() const { cuda::copy(host_.data, device_.data, bytes()); }

 private:
  int64_t bytes() const { return host_.numel() * size_of(host_.dtype); }
  Tensor host_, device_;
};

// Whichever tile tuning finds fastest, the result is right.
TEST_F(OnGpu, EveryTileThatFits) {
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  for (const int64_t d : {16, 64, 96, 128, 192, 256}) {
    for (const Mask& mask : {full(), causal(), window(150, 0)}) {
      Workload w({.dtype = DType::kBF16,
                  .batch = 2,
                  .sq = 700,
                  .sk = 777,
                  .hq = 4,
                  .hk = 2,
                  .d = d,
                  .dv = d,
                  .mask = mask},
                 static_cast<uint64_t>(d));
      const auto expected = expect(w);
      const Copied q(w.forward.q), k(w.forward.k), v(w.forward.v);
      for (const cuda::HopperForwardPlan& plan : cuda::hopper_forward_candidates(
               make_problem(ForwardArgs{q, k, v, w.forward.out, w.forward.lse}, w.options),
               cuda::target_of(gpu))) {
        w.seal();
        const Copied out(w.forward.out), lse(w.forward.lse);
        const ForwardArgs args{q, k, v, out, lse};
        cuda::HopperForward(make_problem(args, w.options), gpu, plan, {}).run(args);
        cuda::synchronize();
        out.bring_back();
        lse.bring_back();
        EXPECT_TRUE(forward_is_right(w, expected))
            << "d " << d << ": " << plan.block_rows() << " x " << plan.block_keys;
      }
    }
  }
}

/// Device memory with the given values.
class OnDevice {
 public:
  OnDevice(DType dtype, std::vector<int64_t> shape, uint64_t seed) {
    const int64_t n = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    host_.resize(static_cast<size_t>(n * size_of(dtype)));
    tensor_ = Tensor::contiguous(host_.data(), dtype, shape);
    std::mt19937_64 random(seed);
    randomize(tensor_, random);
    tensor_.data = cuda::allocate(n * size_of(dtype));
    tensor_.device = {DeviceType::kCuda, 0};
    cuda::copy(tensor_.data, host_.data(), static_cast<int64_t>(host_.size()));
  }
  ~OnDevice() { cuda::deallocate(tensor_.data); }
  OnDevice(const OnDevice&) = delete;
  operator const Tensor&() const { return tensor_; }
  std::vector<std::byte> bits() const {
    std::vector<std::byte> now(host_.size());
    cuda::copy(now.data(), tensor_.data, static_cast<int64_t>(now.size()));
    return now;
  }
  void poison() {
    cuda::copy(tensor_.data, std::vector<std::byte>(host_.size(), std::byte{0xff}).data(),
               static_cast<int64_t>(host_.size()));
  }

 private:
  std::vector<std::byte> host_;
  Tensor tensor_;
};

struct Problem {
  OnDevice q, k, v, out, lse;
  Problem(int64_t batch, int64_t s, int64_t heads, int64_t d)
      : q(DType::kBF16, {batch, s, heads, d}, 1),
        k(DType::kBF16, {batch, s, heads, d}, 2),
        v(DType::kBF16, {batch, s, heads, d}, 3),
        out(DType::kBF16, {batch, s, heads, d}, 4),
        lse(DType::kF32, {batch, heads, s}, 5) {}
  ForwardArgs args() const { return {q, k, v, out, lse}; }
};

/// The driver's functions that the library has no use for.
template <class... Args>
void call_driver(const char* name, Args... args) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  auto* function = reinterpret_cast<int (*)(Args...)>(dlsym(driver, name));
  ASSERT_NE(function, nullptr) << name;
  ASSERT_EQ(function(args...), 0) << name;
}

class Stream {
 public:
  Stream() {
    cuda::synchronize();  // makes the primary context
    call_driver("cuDevicePrimaryCtxRetain", &context_, 0);
    call_driver("cuCtxSetCurrent", context_);
    call_driver("cuStreamCreate", &stream_, 1u);  // CU_STREAM_NON_BLOCKING
  }
  ~Stream() { call_driver("cuStreamDestroy_v2", stream_); }
  void* get() const { return stream_; }

 private:
  void *context_ = nullptr, *stream_ = nullptr;
};

TEST_F(OnGpu, GraphReplaysWhatWasCaptured) {
  const Stream stream;
  Problem p(2, 777, 5, 128);
  Options options;
  options.stream = stream.get();
  for (const Mask& mask : {full(), causal()}) {
    options.mask = mask;
    const Plan plan = fulgur::plan(p.args(), options);
    plan.run(p.args());
    cuda::synchronize();
    const auto out = p.out.bits(), lse = p.lse.bits();
    void *graph = nullptr, *replay = nullptr;
    call_driver("cuStreamBeginCapture_v2", stream.get(), 0);  // the strictest mode
    plan.run(p.args());
    call_driver("cuStreamEndCapture", stream.get(), &graph);
    call_driver("cuGraphInstantiateWithFlags", &replay, graph, 0ull);
    for (int i = 0; i < 3; ++i) {
      p.out.poison();
      p.lse.poison();
      call_driver("cuGraphLaunch", replay, stream.get());
      cuda::synchronize();
      EXPECT_EQ(p.out.bits(), out);
      EXPECT_EQ(p.lse.bits(), lse);
    }
    call_driver("cuGraphExecDestroy", replay);
    call_driver("cuGraphDestroy", graph);
  }
}

TEST_F(OnGpu, EveryRunGivesTheSameBits) {
  Problem p(3, 1000, 16, 64);
  const Plan plan = fulgur::plan(p.args());
  plan.run(p.args());
  const auto out = p.out.bits();
  for (int i = 0; i < 20; ++i) {
    p.out.poison();
    plan.run(p.args());
    ASSERT_EQ(p.out.bits(), out);
  }
}

TEST_F(OnGpu, BroadcastHeadsAreRefusedNotMisread) {
  Problem p(1, 256, 4, 64);
  ForwardArgs args = p.args();
  args.k.strides[2] = args.v.strides[2] = 0;
  EXPECT_EQ(status_of([&] { forward(args); }), Status::kUnsupported);
}

TEST_F(OnGpu, HostTime) {
  Problem p(1, 64, 1, 64);
  const auto best = [](auto&& call) {
    double least = 1;
    for (int round = 0; round < 50; ++round) {
      cuda::synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 100; ++i) call();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      least = std::min(least, time.count() / 100);
    }
    return 1e6 * least;
  };
  const Plan plan = fulgur::plan(p.args());
  const double run = best([&] { plan.run(p.args()); });
  const double forward = best([&] { fulgur::forward(p.args()); });
  fmt::print("host time: run() {:.2f} us, plan and run {:.2f} us\n", run, forward);
  EXPECT_LT(run, 20);  // far above what is expected: only a wait for the device is that slow
}

}  // namespace
}  // namespace fulgur::test
