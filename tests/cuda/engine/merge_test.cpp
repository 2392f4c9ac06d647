// What merge launches.
#include <gtest/gtest.h>

#include "calls.h"
#include "kernels/common/merge_params.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

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

}  // namespace
}  // namespace fulgur::test
