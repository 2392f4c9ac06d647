// What kernels are compiled for: by the device, by what the compiler lists, by name.
#include "cuda/jit/target.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <string>

#include "cuda/engine/architectures.h"
#include "cuda/jit/nvrtc.h"
#include "engines.h"

namespace fulgur::cuda {
namespace {

using test::message_of;
using test::status_of;

constexpr std::array kListed = {75, 80, 86, 89, 90, 100, 120};

std::string name_for(int capability) { return target_of(capability, kListed).name(); }

TEST(TargetOf, ADeviceThatTheCompilerLists) {
  for (const int c : {75, 80, 86, 89, 100, 120}) EXPECT_EQ(name_for(c), "sm_" + std::to_string(c));
  EXPECT_EQ(name_for(90), "sm_90a");
}

TEST(TargetOf, ALaterMinorGetsThatOfALowerOne) {
  EXPECT_EQ(name_for(87), "sm_86");
  EXPECT_EQ(name_for(103), "sm_100");
  EXPECT_EQ(name_for(121), "sm_120");
  EXPECT_EQ(name_for(91), "sm_90");  // 9.0a is for 9.0 alone
}

TEST(TargetOf, ALaterMajorGetsPtx) {
  EXPECT_EQ(name_for(110), "compute_100");
  EXPECT_EQ(name_for(200), "compute_120");
  EXPECT_EQ(target_of(90, std::array{80, 86}).name(), "compute_86");
}

TEST(TargetOf, NothingRuns) {
  if (!nvrtc_unavailable().empty()) GTEST_SKIP() << nvrtc_unavailable();  // the error names it
  const auto target = [] { target_of(72, std::array{75, 90}); };
  EXPECT_EQ(status_of(target), Status::kUnavailable);
  EXPECT_NE(message_of(target).find("compiles for compute capability 7.5, 9.0"), std::string::npos);
}

TEST(Target, RunsOn) {
  using enum Target::Form;
  EXPECT_TRUE(runs(80, {80, kCubin}));
  EXPECT_TRUE(runs(89, {80, kCubin}));
  EXPECT_FALSE(runs(86, {89, kCubin}));
  EXPECT_FALSE(runs(90, {80, kCubin}));
  EXPECT_TRUE(runs(90, {90, kSpecific}));
  EXPECT_FALSE(runs(91, {90, kSpecific}));
  EXPECT_TRUE(runs(120, {80, kPtx}));
  EXPECT_FALSE(runs(80, {86, kPtx}));
}

// What one capability alone has is not in code that later ones run.
TEST(Target, Features) {
  const auto of = [](int capability, Target::Form form) { return features_of({capability, form}); };
  EXPECT_TRUE(of(90, Target::Form::kSpecific).has_wgmma);
  EXPECT_FALSE(of(90, Target::Form::kCubin).has_wgmma);
  EXPECT_TRUE(of(90, Target::Form::kCubin).has_tma);
  EXPECT_FALSE(of(89, Target::Form::kCubin).has_tma);
  EXPECT_TRUE(of(120, Target::Form::kSpecific).has_setmaxnreg);
  EXPECT_FALSE(of(120, Target::Form::kPtx).has_setmaxnreg);
  EXPECT_EQ(capability_row(88).number, 87);
  EXPECT_EQ(capability_row(103).shared_bytes, capability_row(100).shared_bytes);
  EXPECT_EQ(capability_row(130).number, 121);
}

class TargetCalled : public testing::Test {
 protected:
  void SetUp() override {
    if (!nvrtc_unavailable().empty()) GTEST_SKIP() << nvrtc_unavailable();
  }
};

TEST_F(TargetCalled, ByItsName) {
  for (const char* name :
       {"sm_75", "sm_80", "sm_90a", "sm_120a", "compute_75", "compute_80", "compute_120"})
    EXPECT_EQ(target_called(name, "it", kListed).name(), name);
  for (const char* name : {"", "80", "sm80", "sm_", "sm_a", "sm_70", "sm_81", "sm_90b", "sm_90aa",
                           "SM_90", "compute_90a", "sm_-80", "sm_80 "}) {
    const auto call = [&] { target_called(name, "it", kListed); };
    EXPECT_EQ(status_of(call), Status::kInvalidArgument) << name;
    EXPECT_TRUE(message_of(call).starts_with("it: got \"" + std::string(name) + "\", want sm_NN"));
  }
}

TEST_F(TargetCalled, ByTheEnvironment) {
  unsetenv("FULGUR_CUDA_TARGET");
  EXPECT_EQ(forced_target(), std::nullopt);
  setenv("FULGUR_CUDA_TARGET", "compute_80", 1);
  EXPECT_EQ(forced_target(), (Target{80, Target::Form::kPtx}));
  setenv("FULGUR_CUDA_TARGET", "hopper", 1);
  EXPECT_TRUE(message_of([] {
                forced_target();
              }).starts_with("FULGUR_CUDA_TARGET: got \"hopper\", want sm_NN"));
  unsetenv("FULGUR_CUDA_TARGET");
}

// The kernels for Hopper want all that it has.
TEST(Target, DecidesTheFamilies) {
  const Architecture& hopper = architecture_of({90, Target::Form::kSpecific});
  const Architecture& portable = architecture_of({90, Target::Form::kCubin});
  EXPECT_NE(&portable, &hopper);
  EXPECT_EQ(&architecture_of({80, Target::Form::kPtx}), &portable);
  EXPECT_EQ(&architecture_of({121, Target::Form::kCubin}), &portable);
}

}  // namespace
}  // namespace fulgur::cuda
