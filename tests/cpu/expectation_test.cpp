// How long a plan expects a call on the CPU to take. How fast the machine is, is not tested.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "call/make_problem.h"
#include "cpu/estimate.h"
#include "fulgur/append.h"

namespace fulgur::test {
namespace {

struct Shape {
  DType dtype = DType::kF32;
  int64_t batch = 2, sq = 512, sk = 512, hq = 4, hk = 2, d = 64;
};

Tensor rows_of(const Shape& s, int64_t length, int64_t heads) {
  return Tensor::contiguous(nullptr, s.dtype, {s.batch, length, heads, s.d});
}
ForwardArgs forward_args(const Shape& s) {
  const Tensor q = rows_of(s, s.sq, s.hq), k = rows_of(s, s.sk, s.hk);
  return {.q = q, .k = k, .v = k, .out = q};
}
BackwardArgs backward_args(const Shape& s) {
  const Tensor q = rows_of(s, s.sq, s.hq), k = rows_of(s, s.sk, s.hk);
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {s.batch, s.hq, s.sq});
  return {q, q, k, k, q, lse, q, k, k};
}

Options on_two_threads() {
  Options options;
  options.threads = 2;
  return options;
}

struct Expectation {
  double microseconds;
  std::string bound;
  bool at_least;
};
template <class Args>
std::optional<Expectation> expected(const Args& args, const Options& options = on_two_threads()) {
  const Details details = plan(args, options).details();
  if (!details.has("estimate_us")) return std::nullopt;
  return Expectation{details.get<double>("estimate_us"), details.get<std::string>("bound"),
                     details.get<bool>("estimate_is_minimum")};
}

/// The expected time of a whole call, whether memory or computing limits it.
template <class Args>
double microseconds_of(const Args& args) {
  const auto e = expected(args);
  EXPECT_TRUE(e.has_value());
  if (!e) return 0;
  EXPECT_FALSE(e->at_least);
  EXPECT_TRUE(e->bound == "products" || e->bound == "memory") << e->bound;
  return e->microseconds;
}

TEST(Expectation, IsThereForEveryPass) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_GT(microseconds_of(forward_args({.dtype = dtype})), 0);
    EXPECT_GT(microseconds_of(backward_args({.dtype = dtype})), 0);
    EXPECT_GT(microseconds_of(forward_args({.dtype = dtype, .sq = 1, .sk = 9000})), 0);
    EXPECT_GT(microseconds_of(forward_args({.dtype = dtype, .sq = 1, .sk = 100})), 0);
  }
}

// Peaks are measured once, so that the expectations of two plans compare.
TEST(Expectation, IsTheSameInAProcess) {
  const double first = microseconds_of(forward_args({}));
  EXPECT_EQ(microseconds_of(forward_args({})), first);
}

TEST(Expectation, OfCachesNeedsTheirLengths) {
  const Shape s{.sq = 1};
  ForwardArgs args = forward_args(s);
  args.k = args.v = Tensor::contiguous(nullptr, s.dtype, {64, 16, s.hk, s.d});
  args.cache.page_table = Tensor::contiguous(nullptr, DType::kI32, {s.batch, 32});
  int32_t lengths[] = {500, 17};
  args.lengths.seqused_k = Tensor::contiguous(lengths, DType::kI32, {s.batch});
  EXPECT_GT(microseconds_of(args), 0);
  args.lengths.seqused_k.data = nullptr;
  EXPECT_FALSE(expected(args));
}

TEST(Expectation, OfNothingIsNone) {
  EXPECT_FALSE(expected(forward_args({.sq = 0})));
  EXPECT_FALSE(expected(forward_args({.sk = 0})));
  EXPECT_FALSE(expected(backward_args({.sk = 0})));
}

TEST(Expectation, LeavesOutWhatWasNotMeasured) {
  Options options = on_two_threads();
  options.softcap = 3;
  EXPECT_TRUE(expected(forward_args({}), options).value().at_least);
  options.softcap = 0;
  options.dropout_p = 0.1;
  EXPECT_TRUE(expected(backward_args({}), options).value().at_least);

  const Shape s{.sq = 1};
  ForwardArgs args = forward_args(s);
  args.append.k_cache = args.append.v_cache = rows_of(s, s.sk, s.hk);
  args.append.k_new = args.append.v_new = rows_of(s, 1, s.hk);
  int32_t lengths[] = {500, 17};
  args.append.cache_seqlens = Tensor::contiguous(lengths, DType::kI32, {s.batch});
  args.k = args.v = {};
  EXPECT_TRUE(expected(args).value().at_least);
}

cpu::Cost cost(const Shape& s, Pass pass = Pass::kForward, const Options& options = {}) {
  const Problem p = pass == Pass::kForward ? make_problem(forward_args(s), options)
                                           : make_problem(backward_args(s), options);
  std::vector<std::string> rejected;
  const cpu::Kernels& kernels = cpu::choose_kernels(p, &rejected);
  const cpu::CpuPlan plan = cpu::make_plan(p, 2, kernels, &rejected);
  return cpu::cost_of(plan, kernels, p, {{0, 0, s.sq, s.sk}});
}

TEST(Cost, OfTwiceAsManySequencesIsTwice) {
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const int64_t sq : {1, 300}) {
      if (pass == Pass::kBackward && sq == 1) continue;
      const cpu::Cost one = cost({.batch = 8, .sq = sq, .sk = 5000}, pass);
      const cpu::Cost two = cost({.batch = 16, .sq = sq, .sk = 5000}, pass);
      EXPECT_DOUBLE_EQ(two.as_fma, 2 * one.as_fma);
      EXPECT_DOUBLE_EQ(two.flops, 2 * one.flops);
      EXPECT_DOUBLE_EQ(two.bytes, 2 * one.bytes);
      EXPECT_GE(one.tasks, 8);
    }
  }
}

// Rows of few keys, whose tiles a mask cuts, take longer than their flops say, and short ones, too.
TEST(Cost, KnowsWhatIsSlower) {
  const auto per_flop = [](const Shape& s, const Options& options = {}) {
    const cpu::Cost of = cost(s, Pass::kForward, options);
    return of.as_fma / of.flops;
  };
  const Shape longer{.sq = 4096, .sk = 4096};
  const double full = per_flop(longer);
  EXPECT_GT(full, 0);
  Options options;
  options.mask = window(64, 0);
  EXPECT_GT(per_flop(longer, options), 1.5 * full);
  options.mask = causal();
  EXPECT_GT(per_flop(longer, options), full);
  EXPECT_LT(per_flop(longer, options), 1.1 * full);
  EXPECT_GT(per_flop({.sq = 64, .sk = 64}), 1.2 * full);
}

// A thread without a task is not counted.
TEST(Cost, CountsTasks) {
  EXPECT_EQ(cost({.batch = 1, .sq = 1, .sk = 100, .hk = 1}).tasks, 1);
  EXPECT_EQ(cost({.batch = 3, .hk = 2}, Pass::kBackward).tasks, 6);
  EXPECT_EQ(cost({.batch = 1, .hk = 1}, Pass::kBackward).tasks, 2);
}

TEST(Cost, IsWhatBinds) {
  const cpu::Peaks peaks{.threads = 2, .fma = 100e9, .read = 20e9};
  const auto expect = [](const cpu::Cost& cost, const cpu::Peaks& known, double us,
                         const char* bound) {
    const Estimate estimate = cpu::estimate(cost, known);
    EXPECT_NEAR(estimate.microseconds, us, 0.01 * us);
    EXPECT_EQ(estimate.bound, bound);
  };
  expect({.flops = 1.6e9, .as_fma = 2e9, .bytes = 1e6, .tasks = 4}, peaks, 10e3, "products");
  expect({.flops = 1e6, .as_fma = 2e6, .bytes = 1e6, .tasks = 4}, peaks, 51, "memory");
  expect({.flops = 4e11, .as_fma = 2e11, .bytes = 1e6, .tasks = 1},
         {.threads = 1, .fma = 100e9, .read = 20e9}, 2e6, "products");
}

}  // namespace
}  // namespace fulgur::test
