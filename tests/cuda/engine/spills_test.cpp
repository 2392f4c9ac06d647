// Plans where the compiler makes a kernel that spills registers.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "on_fake_gpu.h"
#include "rejected.h"

namespace fulgur::test {
namespace {

/// A process of its own, whose kernels of some tile spill: a copy of the device text, to which a
/// kernel that needs more registers than it may have is added.
class Spills : public OnFakeGpu {
 protected:
  static void SetUpTestSuite() {
    namespace fs = std::filesystem;
    const fs::path folder = fs::temp_directory_path() / fmt::format("fulgur_spills_{}", getpid());
    fs::copy(FULGUR_KERNELS, folder, fs::copy_options::recursive);
    const auto spill = [&](const char* file, const char* condition) {
      std::ofstream(folder / file, std::ios::app)
          << "extern \"C\" __global__ void __launch_bounds__(1024, 2) spilling(volatile float* x) "
             "{\n"
             "  if (!("
          << condition
          << ")) return;\n"
             "  float y[128];\n"
             "  for (int i = 0; i < 128; ++i) y[i] = x[i];\n"
             "  for (int i = 0; i < 128; ++i) x[i] = y[i] + y[127 - i];\n"
             "}\n";
    };
    spill("sm90/forward/forward.cu", "kConsumers == 3");
    spill("decode/decode_codes_warpgroup.cu", "true");
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

// Nor is another kernel taken that is far slower than a spill is: here on keys converted first.
TEST_F(Spills, MuchSlowerKernelsAreNoBetter) {
  ForwardCall call = forward_call({.batch = 64, .sq = 8, .sk = 8192, .hq = 32, .hk = 8});
  call.args.k.dtype = call.args.v.dtype = DType::kInt8;
  const Details details = fulgur::plan(call.args, call.options).details();
  EXPECT_FALSE(details.has("converted"));
  EXPECT_TRUE(details.has("kernel_defect"));
}

}  // namespace
}  // namespace fulgur::test
