// GPUs, drivers and compilers that the CUDA engine cannot use, and what it says of them.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "calls.h"
#include "cuda/device/gpu.h"
#include "folder.h"
#include "fulgur/cuda.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

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

TEST_F(Unavailable, TooOldGpu) {
  EXPECT_EQ(why("FAKE_CUDA_CAPABILITY", "72"),
            "cuda:0 (Fake GPU) has compute capability 7.2; want 7.5 or more");
}

TEST_F(Unavailable, TargetOfAnotherGpu) {
  EXPECT_EQ(why("FULGUR_CUDA_TARGET", "sm_80"),
            "FULGUR_CUDA_TARGET: got sm_80, which Fake GPU of compute capability 9.0 does not run; "
            "want machine code for 9.0 to 9.0, or PTX up to compute_90");
}

TEST_F(Unavailable, TargetOfNoGpu) {
  EXPECT_TRUE(why("FULGUR_CUDA_TARGET", "hopper")
                  .starts_with("FULGUR_CUDA_TARGET: got \"hopper\", want sm_NN, sm_NNa or"));
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

// A GPU that is no Hopper has the portable kernels, and appends and merges as Hopper does.
class OnOtherGpu : public OnFakeGpu {
 protected:
  void SetUp() override {}

  /// `target`: what kernels are compiled for.
  void calls_launch(const char* capability, const char* target) {
    setenv("FAKE_CUDA_CAPABILITY", capability, 1);
    if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
    find_state();
    EXPECT_EQ(cuda::Gpu::at(0).target().name(), target);
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) append(append_args(dtype));
    append(AppendOfHostLengths(DType::kBF16).args);
    const MergeCallOnGpu call(2, 64);
    merge(call.parts, call.result);
    ASSERT_EQ(state_->launches.size(), 6u);
    EXPECT_STREQ(state_->launches[0].kernel, "fulgur_append");
    EXPECT_STREQ(state_->launches[5].kernel, "fulgur_merge");
    const AppendingCall decodes({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
    forward(decodes.call.args, decodes.call.options);
    // Before it the rate of an unknown card may be measured.
    const auto& launches = state_->launches;
    ASSERT_GE(launches.size(), 7u);
    EXPECT_STREQ(launches.back().kernel, "fulgur_decode");
    EXPECT_EQ(launches.back().params.size(), sizeof(DecodeAppendParams));
    const AppendingCall attends({.batch = 3, .sq = 300, .sk = 500, .mask = causal()});
    forward(attends.call.args, attends.call.options);
    ASSERT_GE(launches.size(), 9u);
    EXPECT_STREQ(launches[launches.size() - 2].kernel, "fulgur_append");
    EXPECT_STREQ(launches.back().kernel, "fulgur_portable_forward");
    EXPECT_EQ(launches.back().params.size(), sizeof(PortableForwardParams));
    const BackwardCall gradient =
        backward_call({.sq = 300, .sk = 500, .mask = causal(), .sinks = true}, {.dsinks = true});
    backward(placed(gradient.args, kBase), gradient.options);
    const std::vector<std::string> kernels = {"fulgur_backward_prepare", "fulgur_backward_sinks",
                                              "fulgur_portable_backward", "fulgur_portable_reduce",
                                              "fulgur_backward_round"};
    ASSERT_GE(launches.size(), kernels.size());
    for (size_t i = 0; i < kernels.size(); ++i) {
      const auto& launch = launches[launches.size() - kernels.size() + i];
      EXPECT_EQ(launch.kernel, kernels[i]);
      EXPECT_EQ(launch.params.size(), sizeof(BackwardParams));
    }
    EXPECT_GT(launches[launches.size() - 3].shared_bytes, 0u);
  }
};

TEST_F(OnOtherGpu, Turing) { calls_launch("75", "sm_75"); }

TEST_F(OnOtherGpu, Ampere) { calls_launch("80", "sm_80"); }

TEST_F(OnOtherGpu, Ada) { calls_launch("89", "sm_89"); }

TEST_F(OnOtherGpu, Blackwell) { calls_launch("100", "sm_100"); }

TEST_F(OnOtherGpu, GeForceBlackwell) { calls_launch("120", "sm_120"); }

TEST_F(OnOtherGpu, OfAMinorThatTheCompilerDoesNotKnow) {
  setenv("FAKE_NVRTC_CAPABILITIES", "80 90", 1);
  calls_launch("86", "sm_80");
}

TEST_F(OnOtherGpu, OfAMajorThatTheCompilerDoesNotKnow) { calls_launch("200", "compute_121"); }

TEST_F(OnOtherGpu, ThatIsForcedToPtx) {
  setenv("FULGUR_CUDA_TARGET", "compute_80", 1);
  calls_launch("90", "compute_80");
}

TEST_F(OnOtherGpu, ThatIsForcedToAnotherMinor) {
  setenv("FULGUR_CUDA_TARGET", "sm_80", 1);
  calls_launch("89", "sm_80");
}

TEST_F(OnOtherGpu, ThatIsTooOld) {
  setenv("FAKE_CUDA_CAPABILITY", "72", 1);
  if (!cuda::nvrtc_unavailable().empty()) GTEST_SKIP() << cuda::nvrtc_unavailable();
  EXPECT_EQ(message_of([] { append(append_args(DType::kF16)); }),
            "cuda:0 (Fake GPU) has compute capability 7.2; want 7.5 or more");
}

}  // namespace
}  // namespace fulgur::test
