/// The CUDA engine on a driver whose kernels do nothing and which records its calls.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../fake/fake_driver.h"
#include "../plans/backward_call.h"
#include "cuda/jit/nvrtc.h"
#include "engines.h"
#include "kernels/backward/params.h"
#include "kernels/decode/params.h"
#include "kernels/portable/forward/params.h"
#include "kernels/sm90/forward/params.h"

namespace fulgur::test {

inline EngineInfo cuda_engine() {
  for (const EngineInfo& engine : engines()) {
    if (engine.name == "cuda") return engine;
  }
  return {};
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
inline ForwardArgs placed(ForwardArgs args, std::uintptr_t at) {
  for (ConstTensor* t : {&args.q, &args.k, &args.v})
    t->data = reinterpret_cast<void*>(at += 0x100000000);
  for (Tensor* t : {&args.out, &args.lse}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  if (args.sinks.given()) args.sinks.data = reinterpret_cast<void*>(at += 0x100000000);
  return args;
}

inline BackwardArgs placed(BackwardArgs args, std::uintptr_t at) {
  for (ConstTensor* t :
       {&args.dout, &args.q, &args.k, &args.v, &args.out, &args.lse, &args.dlse, &args.sinks}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  for (Tensor* t : {&args.dq, &args.dk, &args.dv, &args.dsinks}) {
    if (t->given()) t->data = reinterpret_cast<void*>(at += 0x100000000);
  }
  return args;
}

/// What a kernel uses of the workspace: where, and how many bytes.
struct Used {
  const void* begin;
  int64_t bytes;
};

/// They lie in the caller's workspace, aligned and apart.
inline void expect_apart(std::vector<Used> used, const char* begin, int64_t bytes) {
  std::ranges::sort(used, {}, &Used::begin);
  const char* end = begin;
  for (const auto& [at, size] : used) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % 256, 0u);
    EXPECT_GE(static_cast<const char*>(at), end);
    end = static_cast<const char*>(at) + size;
  }
  EXPECT_LE(end, begin + bytes);
}

}  // namespace fulgur::test
