// What calls of few rows launch, over contiguous keys and pages.
#include <gtest/gtest.h>

#include <tuple>

#include "kernels/common/copy_rows_params.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

TEST_F(OnFakeGpu, DecodeReadsACacheWhereItIs) {
  ForwardCall call = forward_call({.dtype = DType::kF16, .batch = 3, .sq = 1, .seqused = true});
  ForwardArgs& args = call.args;
  const Device device{DeviceType::kCuda, 0};
  const auto at = [](int64_t offset) { return reinterpret_cast<void*>(kBase + offset); };
  for (ConstTensor* t : {&args.k, &args.v}) {
    *t = Tensor::contiguous(nullptr, DType::kF16, {40, 16, 2, 128}, device);
    t->strides[0] = 9000;
  }
  args.cache.page_table = Tensor::contiguous(nullptr, DType::kI32, {3, 70}, device);
  args.cache.page_table.strides[0] = 75;
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
  EXPECT_EQ(p.pages.table_stride, 75);
  EXPECT_EQ(p.pages.ids, 70);
  EXPECT_EQ(p.pages.entries, 40);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.hk, 2);
  EXPECT_EQ(static_cast<const void*>(p.seqused_k), args.lengths.seqused_k.data);
  EXPECT_EQ(static_cast<void*>(p.tickets), mine);
  EXPECT_EQ(reinterpret_cast<char*>(p.partial), mine + need.zeroed_bytes);
  // K and V are copied 16 bytes at a time: they must be as aligned in each run as they were
  // planned.
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

// In an invariant call whose sequences may have few rows or many, the forward kernel computes some
// sequences and the decode kernel the others, in one workspace.
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
  EXPECT_EQ(p.sq, 300);  // sequences of more than 16 rows are recognized by their own length
  EXPECT_EQ(static_cast<void*>(p.tickets), mine);
  const int64_t partial = 18000 / 512 * 2 * 64 * 132 * int64_t{4};
  expect_apart({{p.tickets, need.zeroed_bytes}, {p.partial, partial}}, mine, need.bytes);
  EXPECT_EQ(need.bytes, need.zeroed_bytes + partial);
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

}  // namespace
}  // namespace fulgur::test
