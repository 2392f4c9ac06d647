// What sharing out a call among ranks is expected to take: bytes by the sizes, times by the links.
#include "fulgur/distributed/forecast.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "engines.h"
#include "fulgur/cuda.h"

namespace fulgur::test {
namespace {

constexpr int64_t kRows = 131072;
constexpr double kKeyBytes = kRows * 8 * 256 * 2.0;  // of K and V
constexpr double kQueryBytes = kRows * 32 * 128 * 2.0;

/// A causal call of 32 heads in groups of 4, d 128, on an H200.
Plan plan_of(bool backward, bool invariant = false) {
  const Device device{DeviceType::kCuda, 0};
  const auto tensor = [&](int64_t heads) {
    return Tensor::contiguous(nullptr, DType::kBF16, {1, kRows, heads, 128}, device);
  };
  const Tensor q = tensor(32), k = tensor(8);
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {1, 32, kRows}, device);
  const Options options{.mask = causal(), .invariant = invariant};
  if (!backward) {
    return cuda::plan_for_card("h200", ForwardArgs{q, k, k, q, lse}, options);
  }
  return cuda::plan_for_card("h200", BackwardArgs{q, q, k, k, q, lse, q, k, k}, options);
}

constexpr Link kFast{375e9, 5e-6}, kSlow{50e9, 15e-6};

const Forecast& way(const std::vector<Forecast>& all, const std::string& name, int head_ranks = 1) {
  const auto found = std::ranges::find_if(
      all, [&](const Forecast& f) { return f.way == name && f.head_ranks == head_ranks; });
  EXPECT_NE(found, all.end()) << name;
  return *found;
}

TEST(Forecast, OfANode) {
  const Plan plan = plan_of(false);
  const double seconds = plan.details().get<double>("estimate_us") * 1e-6;
  const auto ways = forecast(plan, {8, 8, kFast, kSlow});
  const Forecast& gather = way(ways, "gather");
  EXPECT_DOUBLE_EQ(gather.bytes, kKeyBytes * 7 / 8);
  EXPECT_DOUBLE_EQ(gather.compute, seconds / 8);
  // Few heads come in one step, before the products.
  EXPECT_NEAR(gather.exposed, gather.bytes / 375e9 + 5e-6, 1e-9);
  EXPECT_GT(gather.efficiency, 0.9);
  // q, k and v of own rows but an eighth go and come, then out and LSE.
  const Forecast& heads = way(ways, "heads", 8);
  EXPECT_DOUBLE_EQ(heads.bytes, (2 * kQueryBytes + kKeyBytes + kRows * 32 * 4.0) / 8 * 7 / 8);
  const Forecast& ring = way(ways, "ring");
  EXPECT_DOUBLE_EQ(ring.bytes, gather.bytes);
  EXPECT_EQ(ring.exposed, 0);  // each hop hides
}

TEST(Forecast, OfGradients) {
  const auto forward = forecast(plan_of(false), {4, 4, kFast, kSlow});
  const auto backward = forecast(plan_of(true), {4, 4, kFast, kSlow});
  // Keys and values come again, and sums of their gradients in f32.
  EXPECT_DOUBLE_EQ(way(backward, "gather").bytes, 3 * way(forward, "gather").bytes);
}

// Queries come, too, for dk and dv of own keys, and nothing returns.
TEST(Forecast, OfInvariantGradients) {
  const Plan plan = plan_of(true, true);
  const double seconds = plan.details().get<double>("estimate_us") * 1e-6;
  const auto ways = forecast(plan, {4, 4, kFast, kSlow});
  const Forecast& gather = way(ways, "gather");
  const double rows = kKeyBytes + 3 * kQueryBytes + kRows * 32 * 4.0;
  EXPECT_DOUBLE_EQ(gather.bytes, rows * 3 / 4);
  EXPECT_DOUBLE_EQ(gather.compute, seconds / 4 * 1.4);
  EXPECT_NEAR(gather.exposed, gather.bytes / 375e9 + 5e-6, 1e-9);
  for (const Forecast& f : ways) EXPECT_NE(f.way, "ring");
}

// Gathered bytes do not shrink with ranks, what a rank computes does: nodes then share out heads.
TEST(Forecast, OfManyNodes) {
  const Plan plan = plan_of(false);
  const Ranks ranks{1024, 8, kFast, kSlow};
  const auto ways = forecast(plan, ranks);
  const Forecast &gather = way(ways, "gather"), &both = way(ways, "heads and gather", 8);
  EXPECT_LT(gather.efficiency, 0.1);
  EXPECT_GT(both.efficiency, 2 * gather.efficiency);
  EXPECT_NEAR(both.bytes, kKeyBytes / 8, 0.02 * kKeyBytes);
  const auto faster = forecast(plan, {1024, 8, kFast, {100e9, 15e-6}});
  EXPECT_GT(way(faster, "gather").efficiency, 1.3 * gather.efficiency);
}

TEST(Forecast, Errors) {
  const Plan plan = plan_of(false);
  const auto says = [&](const Ranks& ranks) { return message_of([&] { forecast(plan, ranks); }); };
  EXPECT_EQ(says({0, 1, kFast, kSlow}), "ranks: got 0, want at least 1");
  EXPECT_EQ(says({8, 3, kFast, kSlow}), "node: got 3, want a divisor of the 8 ranks");
  EXPECT_EQ(says({8, 8, {0, 1}, kSlow}),
            "link: got 0 bytes a second and 1 seconds, want more than 0 and at least 0");
  EXPECT_EQ(says({8, 8, kFast, {1, -1}}),
            "node_link: got 1 bytes a second and -1 seconds, want more than 0 and at least 0");
  const Tensor q = Tensor::contiguous(nullptr, DType::kF64, {1, 64, 1, 16});
  const Plan of_reference = fulgur::plan(ForwardArgs{.q = q, .k = q, .v = q, .out = q});
  EXPECT_EQ(message_of([&] {
              forecast(of_reference, {2, 2, kFast, kSlow});
            }),
            "forecast: the plan has no estimate, want one for a card by its name, or of a CPU");
}

}  // namespace
}  // namespace fulgur::test
