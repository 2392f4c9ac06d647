/// What the tests on a GPU share: tensors in device memory, streams, graphs, and the driver's
/// functions that the library has no use for.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/device/gpu.h"
#include "engines.h"
#include "fulgur/cuda.h"
#include "oracle.h"

namespace fulgur::test {

/// Calls a function of the driver, which must succeed. Integers must have the very types of its
/// parameters.
template <class... Args>
void call_driver(const char* name, Args... args) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  ASSERT_NE(driver, nullptr) << dlerror();
  auto* function = reinterpret_cast<int (*)(Args...)>(dlsym(driver, name));
  ASSERT_NE(function, nullptr) << name;
  ASSERT_EQ(function(args...), 0) << name;
}

/// Makes a device's context current in this thread, which the driver's functions want.
inline void use_device(int device = 0) {
  call_driver("cuCtxSetCurrent", cuda::Gpu::at(device).context());
}

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    for (const EngineInfo& engine : engines()) {
      if (engine.name == "cuda" && !engine.unavailable.empty()) {
        GTEST_SKIP() << "cuda: " << engine.unavailable;
      }
    }
    use_device();
  }
};

/// Whether a case on the GPU follows the reference.
inline testing::AssertionResult right(const Case& c) {
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  w.run_forward();
  if (auto result = w.check_memory(); !result) return result << " in " << c.name();
  return forward_is_right(w, expect_forward(w)) << " in " << c.name();
}

/// A stream that does not wait for the default one.
class Stream {
 public:
  Stream() { call_driver("cuStreamCreate", &stream_, 1u); }  // CU_STREAM_NON_BLOCKING
  ~Stream() { call_driver("cuStreamDestroy_v2", stream_); }
  Stream(const Stream&) = delete;
  void* get() const { return stream_; }
  Run run() const { return {.stream = stream_}; }
  void synchronize() const { call_driver("cuStreamSynchronize", stream_); }

 private:
  void* stream_ = nullptr;
};

/// What `body` puts on a stream, to be launched again and again.
class Graph {
 public:
  template <class Body>
  Graph(const Stream& stream, Body body) {
    call_driver("cuStreamBeginCapture_v2", stream.get(), 0);  // the strictest mode
    body();
    call_driver("cuStreamEndCapture", stream.get(), &graph_);
    call_driver("cuGraphInstantiateWithFlags", &executable_, graph_, 0ull);
  }
  ~Graph() {
    call_driver("cuGraphExecDestroy", executable_);
    call_driver("cuGraphDestroy", graph_);
  }
  Graph(const Graph&) = delete;
  void launch(const Stream& stream) const {
    call_driver("cuGraphLaunch", executable_, stream.get());
  }

 private:
  void *graph_ = nullptr, *executable_ = nullptr;
};

/// Every byte of device memory to `value`, when the stream comes to it.
inline void fill(void* data, int64_t bytes, unsigned char value, void* stream = nullptr) {
  if (bytes == 0) return;
  call_driver("cuMemsetD8Async", reinterpret_cast<cuda::CUdeviceptr>(data), value,
              static_cast<size_t>(bytes), stream);
}

/// A row-major tensor in device memory, of random numbers at first.
class DeviceTensor {
 public:
  DeviceTensor(DType dtype, std::vector<int64_t> shape, uint64_t seed, int device = 0) {
    tensor_ = Tensor::contiguous(nullptr, dtype, shape, {DeviceType::kCuda, device});
    std::vector<std::byte> host(static_cast<size_t>(bytes()));
    std::mt19937_64 random(seed);
    randomize(Tensor::contiguous(host.data(), dtype, shape), random);
    tensor_.data = cuda::allocate(bytes(), device);
    cuda::copy(tensor_.data, host.data(), bytes(), device);
    cuda::synchronize(device);  // a stream of its own does not wait for the copy
  }
  /// A vector of these numbers.
  explicit DeviceTensor(const std::vector<int32_t>& values, int device = 0) {
    const auto n = static_cast<int64_t>(values.size());
    tensor_ = Tensor::contiguous(nullptr, DType::kI32, {n}, {DeviceType::kCuda, device});
    tensor_.data = cuda::allocate(bytes(), device);
    cuda::copy(tensor_.data, values.data(), bytes(), device);
    cuda::synchronize(device);
  }
  ~DeviceTensor() { cuda::deallocate(tensor_.data, tensor_.device.index); }
  DeviceTensor(const DeviceTensor&) = delete;
  operator const Tensor&() const { return tensor_; }
  operator ConstTensor() const { return tensor_; }
  int64_t bytes() const { return tensor_.numel() * size_of(tensor_.dtype); }
  /// What is there now; the stream that writes it must have been waited for.
  std::vector<std::byte> bits() const {
    std::vector<std::byte> now(static_cast<size_t>(bytes()));
    cuda::copy(now.data(), tensor_.data, bytes(), tensor_.device.index);
    return now;
  }
  /// NaN everywhere, when the stream comes to it.
  void poison(void* stream = nullptr) const { fill(tensor_.data, bytes(), 0xff, stream); }

 private:
  Tensor tensor_;
};

/// The tensors of a forward call in bf16 on a device; with pages of so many keys, lists of them
/// in a random order.
struct DeviceCall {
  DeviceTensor q, k, v, out, lse;
  int64_t page;
  DeviceTensor ids, begins, used;

  DeviceCall(int64_t batch, int64_t sq, int64_t sk, int64_t heads, int64_t d, uint64_t seed = 1,
             int device = 0, int64_t page = 0)
      : q(DType::kBF16, {batch, sq, heads, d}, seed, device),
        k(DType::kBF16, keys(batch, sk, heads, d, page), seed + 1000, device),
        v(DType::kBF16, keys(batch, sk, heads, d, page), seed + 2000, device),
        out(DType::kBF16, {batch, sq, heads, d}, seed + 3000, device),
        lse(DType::kF32, {batch, heads, sq}, seed + 4000, device),
        page(page),
        ids(shuffled(batch * pages(sk, page), seed), device),
        begins(steps(batch, pages(sk, page)), device),
        used(std::vector<int32_t>(batch, static_cast<int32_t>(sk)), device) {}

  static int64_t pages(int64_t sk, int64_t page) { return page > 0 ? (sk + page - 1) / page : 1; }
  static std::vector<int64_t> keys(int64_t batch, int64_t sk, int64_t heads, int64_t d,
                                   int64_t page) {
    if (page == 0) return {batch, sk, heads, d};
    return {batch * pages(sk, page), page, heads, d};
  }
  static std::vector<int32_t> shuffled(int64_t count, uint64_t seed) {
    std::vector<int32_t> all(static_cast<size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    std::mt19937_64 random(seed);
    std::shuffle(all.begin(), all.end(), random);
    return all;
  }
  static std::vector<int32_t> steps(int64_t batch, int64_t each) {
    std::vector<int32_t> all;
    for (int64_t b = 0; b <= batch; ++b) all.push_back(static_cast<int32_t>(b * each));
    return all;
  }

  ForwardArgs args() const {
    ForwardArgs args{q, k, v, out, lse};
    if (page > 0) {
      args.cache.page_table = ids;
      args.cache.page_indptr = begins;
      args.lengths.seqused_k = used;
    }
    return args;
  }
  void poison(void* stream = nullptr) const {
    out.poison(stream);
    lse.poison(stream);
  }
  /// Bits of out, then of lse.
  std::vector<std::byte> result() const {
    std::vector<std::byte> all = out.bits();
    const std::vector<std::byte> more = lse.bits();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// What the plan gives when nothing else is going on.
  std::vector<std::byte> result_of(const Plan& plan) const {
    poison();
    plan.run(args());
    cuda::synchronize(args().out.device.index);
    return result();
  }
};

/// Whether a plan shares the keys of tiles out, so that its runs meet in the workspace.
inline bool splits(const Plan& plan) {
  const Details details = plan.details();
  if (details.has("split_q_blocks")) return details.get<int64_t>("split_q_blocks") > 0;
  return details.get<std::string>("schedule") != "dynamic" && !details.get<bool>("combine_kernel");
}

}  // namespace fulgur::test
