// Every case on every engine: forward, over caches of its keys, too, and backward against the
// reference, and nothing touched that is not an output.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "cached.h"
#include "engines.h"
#include "fulgur/error.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class Attention : public testing::TestWithParam<std::tuple<Case, EngineInfo>> {};

// The reference of a case serves every engine: engines are the inner loop.
struct Answer {
  std::string name;
  std::unique_ptr<Expected> expected;
};

const Expected& expected(const Workload& w) {
  static Answer last;
  if (last.name != w.c.name()) {
    const bool backward = w.c.tree == Tree::kNone;
    last = {w.c.name(), std::make_unique<Expected>(backward ? expect(w) : expect_forward(w))};
  }
  return *last.expected;
}

bool is_wide(const Case& c) { return std::max(c.d, c.dv) > 256; }

// The CUDA engine computes part of the contract and says so of the rest: the decode kernels, which
// alone have tree masks and wide heads, have no dropout, and wide heads have 16 bits.
bool may_lack(const EngineInfo& engine, const Error& error, const Case& c) {
  const bool lacks = (is_wide(c) && (c.dropout > 0 || c.dtype == DType::kF32)) ||
                     (c.tree != Tree::kNone && c.dropout > 0);
  return engine.name == "cuda" && error.status() == Status::kUnsupported && lacks;
}

// The same keys in caches, of layouts that the case draws: right, and bit for bit as before where
// heads and rows of K lie in the same order, which decides how keys are shared out. On GPUs, where
// another kernel may compute them, which has to be compiled and has no dropout, of cheap cases.
void expect_same_of_caches(Workload& w, const Expected& e, const std::vector<std::byte>& out,
                           const std::vector<std::byte>& lse) {
  const bool cheap = w.c.cost() <= 2'000'000, on_gpu = w.options.engine == "cuda";
  if (on_gpu && (!cheap || w.c.dropout > 0)) return;
  const std::vector<CacheShape> shapes = cache_shapes();
  const size_t count = cheap && !on_gpu ? 3 : 1;
  for (size_t i = 0; i < count; ++i) {
    const CacheShape& shape = shapes[(w.c.seed() + 19 * i) % shapes.size()];
    SCOPED_TRACE(shape.name());
    w.seal();
    Cached cached(w, shape, w.c.seed() + i);
    cached.run_forward();
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
    EXPECT_TRUE(cached.check_memory());
    const bool other_order =
        (w.c.layout == Layout::kBhsd) != (shape.order == CacheShape::Order::kHnd);
    if (on_gpu || other_order) continue;
    EXPECT_EQ(bits(w.forward.out), out);
    EXPECT_EQ(bits(w.forward.lse), lse);
  }
}

TEST_P(Attention, FollowsReference) {
  const auto& [c, engine] = GetParam();
  if (!engine.unavailable.empty()) GTEST_SKIP() << engine.name << ": " << engine.unavailable;
  SCOPED_TRACE("seed " + std::to_string(c.seed()));
  Workload w(c, c.seed());
  w.options.engine = engine.name;
  if (c.dtype == DType::kF64 && engine.name != "reference") {
    EXPECT_EQ(status_of([&] { forward(w.forward, w.options); }), Status::kUnsupported);
    EXPECT_EQ(status_of([&] { backward(w.backward, w.options); }), Status::kUnsupported);
    EXPECT_TRUE(w.nothing_written());
    return;
  }
  const Expected& e = expected(w);
  try {
    w.run_forward();
  } catch (const Error& error) {
    ASSERT_TRUE(may_lack(engine, error, c)) << error.what();
    EXPECT_TRUE(w.nothing_written());
    GTEST_SKIP() << error.what();
  }
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(w.check_memory());

  const auto out = bits(w.forward.out), lse = bits(w.forward.lse);
  if (c.tree == Tree::kNone) {
    w.run_backward();
    EXPECT_TRUE(backward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
    EXPECT_EQ(bits(w.forward.out), out) << "backward wrote its input out";
    EXPECT_EQ(bits(w.forward.lse), lse) << "backward wrote its input lse";
  }
  expect_same_of_caches(w, e, out, lse);
}

std::string name(const testing::TestParamInfo<Attention::ParamType>& info) {
  const auto& [c, engine] = info.param;
  return engine.name + "_" + c.name();
}

INSTANTIATE_TEST_SUITE_P(Small, Attention,
                         testing::Combine(testing::ValuesIn(small_cases()),
                                          testing::ValuesIn(engines_here())),
                         name);
INSTANTIATE_TEST_SUITE_P(Large, Attention,
                         testing::Combine(testing::ValuesIn(large_cases()),
                                          testing::ValuesIn(engines_here())),
                         name);

}  // namespace
}  // namespace fulgur::test
