// Plans for cards that are not here, and what they expect.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "backward_call.h"
#include "engines.h"
#include "forward_call.h"
#include "fulgur/cuda.h"

namespace fulgur::test {
namespace {

Plan plan_for(const std::string& card, const ForwardShape& shape) {
  const ForwardCall call = forward_call(shape);
  return cuda::plan_for_card(card, call.args, call.options);
}

struct Expected {
  double microseconds;
  std::string bound;
};

Expected expected(const Plan& plan) {
  const Details details = plan.details();
  return {details.get<double>("estimate_us"), details.get<std::string>("bound")};
}

constexpr ForwardShape kPrefill{.batch = 4, .sq = 8192, .sk = 8192, .hq = 16, .hk = 16};
constexpr ForwardShape kDecode{.batch = 64, .sq = 1, .sk = 16384, .hq = 32, .hk = 8};

TEST(CardPlan, ProductsBindLongCalls) {
  for (const char* card : {"h100", "h200"}) {
    const Plan plan = plan_for(card, kPrefill);
    const auto [microseconds, bound] = expected(plan);
    EXPECT_EQ(bound, "products") << card;
    const double teraflops = 1e-6 * plan.flops() / microseconds;
    EXPECT_GT(teraflops, 500) << card;
    EXPECT_LT(teraflops, 950) << card;
    EXPECT_NE(plan.explain().find(std::string("expects   about ")), std::string::npos);
  }
}

TEST(CardPlan, MemoryBindsDecoding) {
  const auto [of_h200, bound] = expected(plan_for("h200", kDecode));
  EXPECT_EQ(bound, "memory");
  EXPECT_NEAR(expected(plan_for("h100", kDecode)).microseconds / of_h200, 4.8 / 3.35, 0.15);
}

// Codes of k and v become numbers of the dtype of q where that is faster than decoding, and of f32
// always, in workspace that the call may have.
TEST(CardPlan, CodesAreConvertedForManyRows) {
  const auto details = [](const char* card, const ForwardShape& shape, DType codes) {
    ForwardCall call = forward_call(shape);
    call.args.k.dtype = call.args.v.dtype = codes;
    return cuda::plan_for_card(card, call.args, call.options).details();
  };
  for (const char* card : {"h200", "a100"}) {
    for (const DType codes : {DType::kE4M3, DType::kInt8, DType::kInt4, DType::kQ4_0}) {
      SCOPED_TRACE(testing::Message() << card << " " << name_of(codes));
      ForwardShape shape{.batch = 1, .sq = 2048, .sk = 8192, .hq = 32, .hk = 8};
      const Details many = details(card, shape, codes);
      EXPECT_EQ(many.get<std::string>("converted"), "bf16");
      EXPECT_EQ(many.get<int64_t>("converted_bytes"), 2 * 8192 * 8 * 128 * 2);
      EXPECT_GE(many.get<int64_t>("workspace_bytes"), 2 * 8192 * 8 * 128 * 2);
      shape.invariant = true;
      EXPECT_FALSE(details(card, shape, codes).has("converted"));
      shape.invariant = false;
      shape.max_workspace = many.get<int64_t>("converted_bytes") - 1;
      EXPECT_FALSE(details(card, shape, codes).has("converted"));
      shape.max_workspace = 0;
      shape.sq = 1;
      EXPECT_FALSE(details(card, shape, codes).has("converted"));
      shape.dtype = DType::kF32;
      const Details wide = details(card, shape, codes);
      EXPECT_EQ(wide.get<int64_t>("converted_bytes"), 2 * 8192 * 8 * 128 * 4);
      EXPECT_GT(wide.get<int64_t>("splits"), 1);  // few rows
      shape.dtype = DType::kF16;
      shape.sq = 2048;
      EXPECT_FALSE(details(card, shape, codes).has("converted"));
    }
  }
}

// The portable kernels, by the peaks of 16-bit products that the makers state.
TEST(CardPlan, CardsOfTheSameCapabilityDiffer) {
  for (const auto& [card, peak] : {std::pair{"a100", 312.0},
                                   {"a10", 125.0},
                                   {"3090", 71.0},
                                   {"l40s", 362.0},
                                   {"4090", 165.0},
                                   {"5090", 209.5},
                                   {"rtx-pro-6000", 504.0},
                                   {"gb10", 125.0}}) {
    const Plan plan = plan_for(card, kPrefill);
    EXPECT_EQ(expected(plan).bound, "products") << card;
    const double share = 1e-6 * plan.flops() / expected(plan).microseconds / peak;
    EXPECT_GT(share, 0.5) << card;
    EXPECT_LE(share, 1.015) << card;
    EXPECT_TRUE(plan.details().get<std::string>("kernel").starts_with("portable")) << card;
  }
}

TEST(CardPlan, ExponentialsBindNarrowHeads) {
  ForwardShape narrow = kPrefill;
  narrow.d = 32;
  EXPECT_NE(plan_for("h200", narrow).explain().find("peak of exponentials, which binds"),
            std::string::npos);
}

TEST(CardPlan, OfAGradient) {
  const BackwardCall call = backward_call({.batch = 4, .sq = 4096, .sk = 4096, .mask = causal()});
  const Plan plan = cuda::plan_for_card("h100", call.args, call.options);
  EXPECT_EQ(plan.details().get<std::string>("call.pass"), "backward");
  EXPECT_GT(expected(plan).microseconds, 0);
}

TEST(CardPlan, RunsNowhere) {
  const ForwardCall call = forward_call({});
  const Plan plan = cuda::plan_for_card("h100", call.args, call.options);
  ForwardArgs there = call.args;
  std::uintptr_t at = 0x7f0000000000;
  for (ConstTensor* t : {&there.q, &there.k, &there.v})
    t->data = reinterpret_cast<void*>(at += 1 << 28);
  for (Tensor* t : {&there.out, &there.lse}) t->data = reinterpret_cast<void*>(at += 1 << 28);
  const auto run = [&] { plan.run(there); };
  EXPECT_EQ(status_of(run), Status::kUnsupported);
  EXPECT_NE(message_of(run).find("one H100, and runs nowhere"), std::string::npos);
}

TEST(CardPlan, WhatIsRefused) {
  EXPECT_EQ(status_of([] { plan_for("v100", {}); }), Status::kInvalidArgument);
  EXPECT_EQ(status_of([] { plan_for("a100", {.dtype = DType::kF32, .d = 320}); }),
            Status::kUnsupported);
  ForwardCall call = forward_call({});
  for (ConstTensor* t : {&call.args.q, &call.args.k, &call.args.v}) t->device = {};
  call.args.out.device = call.args.lse.device = {};
  EXPECT_NE(message_of([&] {
              cuda::plan_for_card("h100", call.args, call.options);
            }).find("computes tensors on cuda"),
            std::string::npos);
}

}  // namespace
}  // namespace fulgur::test
