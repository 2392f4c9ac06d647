// What the CUDA engine decides about a backward pass: how dQ is computed, tiles and stages, splits
// of kv heads, cut blocks, and which kernels plans share.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "backward_plans.h"
#include "cuda/engine/choose.h"
#include "cuda/sm90/backward.h"
#include "cuda/sm90/families.h"

namespace fulgur::cuda {
namespace {

using namespace sm90;

using test::backward_problem;
using test::BackwardOptions;
using test::bytes_of;
using test::ForwardShape;
using test::kMasks;
using test::many_problems;
using test::min_bytes;
using test::plans;
using test::stored;
using test::within;

TEST(BackwardPlan, AccumulatesDqOrStoresDs) {
  for (const Problem& p : many_problems()) {
    std::vector<std::string> rejected;
    const std::vector<BackwardPlan> all = plans(p, &rejected);
    const int64_t max_dim = p.softcap > 0 ? 64 : 128;
    const bool narrow = p.d <= max_dim && p.dv <= max_dim;
    const auto with = [&](DqMethod method) {
      return std::ranges::count(all, method, &BackwardPlan::dq_method);
    };
    const auto shorter = std::ranges::count(all, 1, &BackwardPlan::consumers);
    EXPECT_LE(shorter, narrow && p.sq <= 1024 ? 1 : 0);
    EXPECT_EQ(with(DqMethod::kAtomic), narrow ? 1 + shorter : 0);
    EXPECT_EQ(with(DqMethod::kOrdered), narrow ? 1 : 0);
    EXPECT_EQ(with(DqMethod::kStored), 1);
    EXPECT_EQ(rejected.empty(), narrow);
    for (const BackwardPlan& plan : all) {
      EXPECT_EQ(plan.ds_bytes == 0, plan.accumulates_dq());
      EXPECT_EQ(plan.dq_accum_floats(p.hq) > 0, plan.accumulates_dq());
      EXPECT_EQ(plan.dq_semaphores(p.hq) > 0, plan.dq_method == DqMethod::kOrdered);
      EXPECT_EQ(plan.repairs(), plan.has_left || plan.has_right);
    }
  }
}

TEST(BackwardPlan, DeterministicCallsAddInOrder) {
  for (const int64_t d : {64, 128}) {
    std::vector<std::string> rejected;
    const std::vector<BackwardPlan> all =
        plans(backward_problem({.d = d}, {.deterministic = true}), &rejected);
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].dq_method, DqMethod::kOrdered);
    EXPECT_EQ(all[1].dq_method, DqMethod::kStored);
    EXPECT_EQ(rejected.size(), 1u);
  }
}

// What an invariant call takes depends on its options alone.
TEST(BackwardPlan, InvariantCallsStoreDs) {
  for (const int64_t d : {64, 128}) {
    std::vector<std::string> rejected;
    const std::vector<BackwardPlan> all =
        plans(backward_problem({.d = d, .invariant = true}), &rejected);
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0].dq_method, DqMethod::kStored);
    EXPECT_EQ(rejected.size(), 1u);
  }
}

// `invariant`: nothing that a sequence's bits depend on does on the batch.
TEST(BackwardPlan, InvariantDoesNotLookAtTheBatch) {
  for (const Mask& mask : {full(), causal(), window(300, 0), window(1000000, 5),
                           chunked(700, causal()), chunked(1000000)}) {
    for (const int64_t d : {64, 128, 256}) {
      std::set<std::string> headers;
      for (const int64_t batch : {1, 7, 1000}) {
        for (const int64_t s : {1, 500, 4096}) {
          BackwardPlan plan = stored(backward_problem({.batch = batch,
                                                       .sq = s,
                                                       .sk = s,
                                                       .d = d,
                                                       .mask = mask,
                                                       .packed = true,
                                                       .invariant = true}));
          plan.row_tiles = plan.row_stages = 0;  // a row has the same bits in any block
          headers.insert(kernel_config(plan));
        }
      }
      EXPECT_EQ(headers.size(), 1u);
    }
  }
}

TEST(BackwardPlan, FitsTheMachine) {
  for (const Problem& p : many_problems()) {
    for (const BackwardPlan& plan : plans(p)) {
      EXPECT_LE(plan.keys_shared_bytes, 232448);
      EXPECT_LE(plan.rows_shared_bytes, 232448);
      EXPECT_GE(plan.q_stages, 2);
      EXPECT_GE(plan.o_stages, 2);
      EXPECT_GE(plan.row_stages, 2);
      const bool narrow = std::max(plan.head_dim, plan.value_dim) <= 64;
      EXPECT_EQ(plan.k_stages, narrow || plan.dq_method == DqMethod::kAtomic ? 2 : 1);
      EXPECT_EQ(plan.ds_stages, narrow || plan.k_stages == 1 ? 2 : 1);
      const bool third = plan.dq_method == DqMethod::kOrdered && plan.block_rows == 64;
      EXPECT_EQ(plan.dq_stages, !plan.accumulates_dq() ? 0 : third ? 3 : 2);
      EXPECT_EQ(plan.block_keys % plan.block_rows, 0);
      EXPECT_EQ(plan.rows_of_block() % plan.block_rows, 0);
      EXPECT_EQ(plan.threads(), 128 * (plan.consumers + (plan.accumulates_dq() ? 2 : 1)));
      EXPECT_TRUE(!plan.wide() || plan.block_rows == 64);
      // dK and dV of 64 keys by one warpgroup: as many accumulators as registers hold.
      EXPECT_TRUE(plan.wide() || plan.head_dim + plan.value_dim <= 320);
      EXPECT_EQ(plan.grid, 132);
    }
  }
}

TEST(BackwardPlan, DerivesStages) {
  const auto stages = [](int64_t batch, int64_t d, bool stores) {
    const Problem p = backward_problem({.batch = batch, .d = d});
    const BackwardPlan plan = stores ? stored(p) : plans(p).front();
    EXPECT_EQ(plan.k_stages, d == 64 || (d == 128 && !stores) ? 2 : 1);
    return std::array{plan.q_stages, plan.o_stages, plan.row_tiles, plan.row_stages};
  };
  EXPECT_EQ(stages(64, 64, false), (std::array{3, 2, 4, 3}));
  EXPECT_EQ(stages(64, 128, false), (std::array{3, 2, 2, 4}));
  EXPECT_EQ(stages(64, 128, true), (std::array{4, 4, 2, 4}));
  EXPECT_EQ(stages(64, 256, false), (std::array{3, 2, 1, 4}));
  // Few row blocks are smaller, so that all SMs have one.
  EXPECT_EQ(stages(1, 64, true)[2], 1);
  EXPECT_EQ(stages(1, 128, true)[2], 1);
}

// A CTA has one consumer warpgroup if that gives more SMs work and each key block of 64 keys an SM.
TEST(BackwardPlan, ShortCallsTakeOneWarpgroupACta) {
  const auto fastest = [](const ForwardShape& shape, BackwardOptions options = {}) {
    std::vector<std::string> rejected;
    const auto tiles = backward_candidates(backward_problem(shape, options), {}, &rejected);
    return std::ranges::min_element(tiles, {}, &Fitting<BackwardPlan>::cycles)->plan;
  };
  for (const int64_t d : {64, 128}) {
    for (const Mask& mask : {full(), causal()}) {
      for (const auto& [s, heads] : {std::pair{128, 32}, {256, 16}, {512, 16}, {1024, 8}}) {
        const ForwardShape shape{
            .batch = 1, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = mask};
        const BackwardPlan plan = fastest(shape);
        EXPECT_EQ(plan.consumers, 1) << s << " rows, " << heads << " heads, d " << d;
        EXPECT_EQ(plan.block_keys, 64);
        EXPECT_FALSE(plan.wide());
        EXPECT_EQ(plan.block_rows, d == 64 && s > 256 ? 128 : 64);
        ForwardShape other = shape;
        other.batch = 4;  // more blocks than SMs
        EXPECT_EQ(fastest(other).consumers, 2);
        EXPECT_EQ(fastest(shape, {.deterministic = true}).consumers, 2);
      }
    }
  }
}

// What a kernel does not depend on stays out of its kernel_config.h, so that it is compiled once.
TEST(BackwardPlan, KernelsAreSharedBetweenPlans) {
  const auto kernels = [](ForwardShape shape, const BackwardOptions& with = {}) {
    std::map<std::string, std::string> headers;
    shape.hk = shape.hq;  // groups have a kernel more
    for (const KernelUse& use : backward_kernels(stored(backward_problem(shape, with))))
      headers[use.entry] = use.request.kernel_config;
    return headers;
  };
  auto plain = kernels({.mask = causal()});
  const auto same = [&](std::map<std::string, std::string> other) {
    std::set<std::string> names;
    for (const auto& [entry, header] : plain) {
      if (other[entry] == header)
        names.insert(entry.substr(std::string("fulgur_backward_").size()));
    }
    return names;
  };
  using Names = std::set<std::string>;
  EXPECT_EQ(plain.size(), 4u);
  EXPECT_EQ(same(kernels({.mask = causal(), .softcap = 30})), (Names{"prepare", "rows"}));
  EXPECT_EQ(same(kernels({.mask = causal(), .alibi = true})), (Names{"prepare", "rows"}));
  EXPECT_EQ(same(kernels({.mask = causal()}, {.dlse = true})), (Names{"keys", "repair", "rows"}));
  EXPECT_EQ(same(kernels({.mask = causal(), .seqused = true})), Names{"prepare"});
  EXPECT_EQ(same(kernels({.mask = causal(), .seqused_q = true})), Names{});
  EXPECT_EQ(same(kernels({.mask = causal(), .dropout = 0.1})), (Names{"prepare", "rows"}));
  EXPECT_EQ(same(kernels({.mask = window(5, 5)})), Names{"prepare"});
  EXPECT_EQ(same(kernels({.d = 112, .mask = causal()})), (Names{"prepare", "repair"}));
  EXPECT_EQ(same(kernels({.d = 80, .mask = causal()})), Names{"prepare"});
  EXPECT_EQ(same(kernels({.mask = causal(), .packed = true})), Names{});
  EXPECT_EQ(same(kernels({.dtype = DType::kF16, .mask = causal()})), Names{});
}

// The kernel that rounds dQ depends on its panels of 64 columns; with a bound it repairs gradients,
// and so depends on all that scores depend on.
TEST(BackwardPlan, RoundingIsSharedBetweenPlans) {
  const auto header = [](const ForwardShape& shape) {
    const BackwardPlan plan = plans(backward_problem(shape)).at(0);
    EXPECT_TRUE(plan.accumulates_dq());
    for (const KernelUse& use : backward_kernels(plan)) {
      if (use.entry == std::string("fulgur_backward_round")) return use.request.kernel_config;
    }
    return std::string();
  };
  const std::string plain = header({.d = 128, .mask = causal()});
  EXPECT_NE(plain, "");
  EXPECT_EQ(header({.d = 80, .dv = 128, .mask = causal()}), plain);
  EXPECT_NE(header({.d = 128, .mask = causal(), .alibi = true}), plain);
  EXPECT_NE(header({.d = 128}), plain);
  EXPECT_EQ(header({.d = 128, .alibi = true, .seqused = true}), header({.d = 128}));
  EXPECT_NE(header({.d = 64, .mask = causal()}), plain);
}

// Measured on an H100: key blocks that iterate over eight long q heads each drift apart, and L2
// holds the rows of none.
TEST(BackwardPlan, OrderedAdditionsSplitLongGroups) {
  const auto splits = [](int64_t s, int64_t hk) {
    const ForwardShape shape = {.batch = 2, .sq = s, .sk = s, .hq = 64, .hk = hk, .d = 128};
    return plans(backward_problem(shape, {.deterministic = true})).at(0).splits;
  };
  EXPECT_EQ(splits(4096, 8), 1);
  EXPECT_EQ(splits(8192, 8), 8);
  EXPECT_EQ(splits(16384, 8), 8);
  EXPECT_EQ(splits(16384, 64), 1);
}

// Measured on an H100, batch 1 and 2: the kernel that rounds is shorter than the one by rows, and
// additions wait for nothing.
TEST(BackwardPlan, ShortCallsAddInNoOrder) {
  for (const Mask& mask : {full(), causal()}) {
    for (const int64_t d : {64, 128}) {
      for (const int64_t s : {128, 256, 512, 1024}) {
        for (const int64_t heads : {8, 16, 32}) {
          std::vector<std::string> rejected;
          const auto tiles = backward_candidates(
              backward_problem(
                  {.batch = 1, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = mask}),
              {}, &rejected);
          const auto best = std::ranges::min_element(tiles, {}, &Fitting<BackwardPlan>::cycles);
          EXPECT_EQ(best->plan.dq_method, DqMethod::kAtomic) << s << " " << heads;
        }
      }
    }
  }
}

// The kernel by keys rounds dQ where each key block has an SM and some key block adds to each row.
TEST(BackwardPlan, KernelByKeysRoundsDqOfShortCalls) {
  const auto rounds = [](const Problem& p) {
    bool any = false;
    for (const BackwardPlan& plan : plans(p)) {
      const auto kernels = sm90::backward_kernels(plan);
      const bool launched = std::ranges::any_of(kernels, [](const cuda::KernelUse& use) {
        return use.entry == std::string("fulgur_backward_round");
      });
      EXPECT_EQ(launched, plan.accumulates_dq() && !plan.rounds_dq);
      EXPECT_EQ(workspace_of(p, plan).dq_additions < workspace_of(p, plan).zeros, plan.rounds_dq);
      if (!plan.rounds_dq) continue;
      any = true;
      EXPECT_EQ(plan.dq_method, DqMethod::kAtomic);
      EXPECT_FALSE(plan.packed || plan.reduces() || plan.cut_blocks > 0);
      EXPECT_LE(p.sq, 1024);  // bits of a word for each 64 rows
      const kernels::BlockSchedule& blocks = plan.waves.at(0).key_blocks;
      EXPECT_LE(blocks.blocks * blocks.batch_heads, 132);
    }
    return any;
  };
  for (const Problem& p : many_problems()) rounds(p);
  const ForwardShape shape{.batch = 2, .sq = 256, .sk = 256, .hq = 32, .hk = 32, .d = 64};
  const auto with = [&](const auto& change) {
    ForwardShape changed = shape;
    change(changed);
    return backward_problem(changed);
  };
  EXPECT_TRUE(rounds(backward_problem(shape)));
  EXPECT_TRUE(rounds(with([](ForwardShape& s) { s.mask = causal(); })));
  EXPECT_FALSE(rounds(backward_problem(shape, {.deterministic = true})));
  EXPECT_FALSE(rounds(with([](ForwardShape& s) { s.invariant = true; })));
  EXPECT_FALSE(rounds(with([](ForwardShape& s) { s.packed = true; })));
  EXPECT_FALSE(rounds(with([](ForwardShape& s) { s.seqused = true; })));
  EXPECT_FALSE(rounds(with([](ForwardShape& s) { s.hk = 8; })));
  EXPECT_FALSE(rounds(with([](ForwardShape& s) { s.batch = 3; })));  // more key blocks than SMs
  EXPECT_FALSE(rounds(with([](ForwardShape& s) { s.sk = 0; })));
  EXPECT_FALSE(rounds(with([](ForwardShape& s) {  // the first rows see no key
    s.sk = 100;
    s.mask = causal();
  })));
}

// Kv heads are split if they leave SMs idle, but not if the batch would decide it for a sequence.
// The kernel that reduces depends on what is written, not on how it was computed.
TEST(BackwardPlan, FewKvHeadsAreSplit) {
  const auto splits = [](ForwardShape shape, const BackwardOptions& with = {}) {
    std::set<int64_t> found;
    for (const BackwardPlan& plan : plans(backward_problem(shape, with))) {
      EXPECT_EQ(plan.splits * plan.split_heads, shape.hq / shape.hk * plan.row_splits);
      found.insert(plan.splits);
    }
    return found;
  };
  using Counts = std::set<int64_t>;
  const ForwardShape few = {.batch = 1, .sq = 4096, .sk = 4096, .hq = 8, .hk = 1, .d = 128};
  EXPECT_FALSE(splits(few).contains(1));
  EXPECT_EQ(splits({.batch = 16, .sq = 4096, .sk = 4096, .hq = 64, .hk = 8, .d = 128}), Counts{1});
  for (ForwardShape shape = few; shape.sq <= 8192; shape.sq = shape.sk = 2 * shape.sq) {
    shape.invariant = true;
    EXPECT_EQ(splits(shape), Counts{1});
  }
  // Rows are split, too, unless additions are ordered from the diagonals on.
  const ForwardShape one = {
      .batch = 1, .sq = 8192, .sk = 8192, .hq = 1, .hk = 1, .d = 128, .mask = causal()};
  for (const BackwardPlan& plan : plans(backward_problem(one)))
    EXPECT_EQ(plan.row_splits > 1, plan.dq_method == DqMethod::kAtomic);
  const ForwardShape cross = {.batch = 1, .sq = 16384, .sk = 256, .hq = 16, .hk = 16};
  for (const BackwardPlan& plan : plans(backward_problem(cross)))
    EXPECT_EQ(plan.row_splits > 1, plan.accumulates_dq());
  const auto reduce = [](const ForwardShape& shape, size_t plan) {
    for (const KernelUse& use : backward_kernels(plans(backward_problem(shape)).at(plan))) {
      if (use.entry == std::string("fulgur_backward_reduce")) return use.request.kernel_config;
    }
    return std::string();
  };
  ForwardShape other = few;
  other.mask = causal();
  const std::string causal_reduce = reduce(other, 0);
  EXPECT_NE(causal_reduce, "");
  EXPECT_NE(causal_reduce, reduce(few, 0)) << "only masks have repairs";
  EXPECT_EQ(causal_reduce, reduce(other, 1));  // ordered
  EXPECT_EQ(causal_reduce, reduce(other, 2));  // stored
  other.mask = window(5, 5);
  other.alibi = other.seqused = true;
  EXPECT_EQ(reduce(other, 0), causal_reduce);
  other.d = 64;
  EXPECT_NE(reduce(other, 0), causal_reduce);
}

// The last key blocks are cut if the last round would be incomplete: only blocks of one length, of
// kv heads that are not split, with additions in no order and rows that L2 holds.
TEST(BackwardPlan, LastBlocksAreCut) {
  const auto cut = [](const ForwardShape& shape, const BackwardOptions& with = {}) {
    int cut_blocks = 0;
    for (const BackwardPlan& plan : plans(backward_problem(shape, with))) {
      cut_blocks = std::max(cut_blocks, plan.cut_blocks);
      if (plan.cut_blocks == 0) continue;
      EXPECT_TRUE(plan.dq_method == DqMethod::kAtomic && plan.splits == 1 &&
                  plan.waves.size() == 1);
      EXPECT_EQ(plan.cut_blocks, plan.grid - 1);
      // Partial dK and dV of cut blocks have a place.
      const kernels::BlockSchedule& blocks = plan.waves[0].key_blocks;
      int first = blocks.batch_heads;
      for (int i = 0; i < plan.cut_blocks; ++i)
        first = std::min(first,
                         block_of(blocks, blocks.blocks * blocks.batch_heads - 1 - i).batch_head);
      EXPECT_GE(first, plan.first_cut_head);
      EXPECT_LT(first, plan.first_cut_head + blocks.section_heads);
    }
    return cut_blocks;
  };
  // As bits a bool mask leaves blocks their length; as a bias any mask may leave gradients to
  // repair.
  const auto cut_of_bits = [](ForwardShape shape, const Mask& mask = {}) {
    shape.bias = DType::kBool;
    shape.mask = mask;
    Problem p = backward_problem(shape);
    p.bias.head = p.bias.batch = 0;
    std::set<std::pair<bool, bool>> found;
    for (const BackwardPlan& plan : plans(p))
      if (plan.dq_method == DqMethod::kAtomic) found.emplace(plan.mask_bits, plan.cut_blocks > 0);
    return found;
  };
  for (const int64_t s : {4096, 8192, 16384}) {
    for (const int64_t d : {64, 80, 96, 128}) {
      const ForwardShape shape = {
          .batch = 16384 / s, .sq = s, .sk = s, .hq = 2048 / d, .hk = 2048 / d, .d = d};
      EXPECT_EQ(cut(shape), 131) << d << " " << s;
      EXPECT_EQ(cut(shape, {.deterministic = true}), 0);
      EXPECT_EQ(cut_of_bits(shape), (std::set{std::pair{true, true}, std::pair{false, false}}));
      EXPECT_EQ(cut_of_bits(shape, causal()),
                (std::set{std::pair{true, false}, std::pair{false, false}}));
      ForwardShape other = shape;
      other.mask = causal();
      EXPECT_EQ(cut(other), 0);
      other = shape;
      other.packed = true;
      EXPECT_EQ(cut(other), 0);
      other = shape;
      other.invariant = true;
      EXPECT_EQ(cut(other), 0);
    }
    EXPECT_EQ(cut({.batch = 16384 / s, .sq = s, .sk = s, .hq = 8, .hk = 8, .d = 256}), 0);
  }
  // Whole rounds, short blocks, and rows that L2 does not hold.
  const auto of = [](int64_t batch, int64_t s, int64_t hq, int64_t hk) {
    return ForwardShape{.batch = batch, .sq = s, .sk = s, .hq = hq, .hk = hk, .d = 128};
  };
  EXPECT_EQ(cut(of(33, 4096, 16, 16)), 0);
  EXPECT_EQ(cut(of(64, 256, 16, 16)), 0);
  EXPECT_EQ(cut(of(4, 4096, 64, 8)), 0);
  EXPECT_EQ(cut(of(1, 131072, 3, 3)), 0);
  // Blocks are not cut either if the workspace has no room for their partial dK and dV.
  ForwardShape shape = of(4, 4096, 16, 16);
  const BackwardPlan roomy = plans(backward_problem(shape)).at(0);
  shape.max_workspace = workspace_of(backward_problem(shape), roomy).end - 1;
  const BackwardPlan tight = plans(backward_problem(shape)).at(0);
  EXPECT_EQ(tight.cut_blocks, 0);
  EXPECT_EQ(tight.first_cut_head, 0);
  EXPECT_TRUE(tight.accumulates_dq());
  EXPECT_EQ(describe(roomy).details.get<int64_t>("cut_k_blocks"), 131);
  EXPECT_EQ(describe(tight).details.get<int64_t>("cut_k_blocks"), 0);
}

// If the workspace has no room for partial dK and dV of so many splits, there are fewer.
TEST(BackwardPlan, SplitsFitTheWorkspace) {
  ForwardShape shape = {.batch = 1, .sq = 4096, .sk = 4096, .hq = 8, .hk = 1, .d = 128};
  const BackwardPlan roomy = plans(backward_problem(shape)).at(0);
  ASSERT_TRUE(roomy.reduces());
  shape.max_workspace = workspace_of(backward_problem(shape), roomy).end - 1;
  const Problem tight = backward_problem(shape);
  const BackwardPlan plan = plans(tight).at(0);
  EXPECT_LT(plan.splits, roomy.splits);
  EXPECT_LE(workspace_of(tight, plan).end, shape.max_workspace);
}

// The gradient of sinks is one more kernel; the others depend on sinks by LSE alone.
TEST(BackwardPlan, SinksHaveAKernel) {
  const auto kernels = [](const ForwardShape& shape, bool dsinks) {
    std::set<std::string> texts;
    const Problem p = backward_problem(shape, {.dsinks = dsinks});
    EXPECT_EQ(backward_rejects(p), "");
    for (const KernelUse& use : backward_kernels(plans(p).at(0)))
      texts.insert(use.request.source + use.request.kernel_config);
    return texts;
  };
  const auto without = [](std::set<std::string> all, const std::set<std::string>& others) {
    for (const std::string& other : others) EXPECT_EQ(all.erase(other), 1u);
    return all;
  };
  const auto plain = kernels({.d = 64}, false), packed = kernels({.d = 64, .packed = true}, false);
  EXPECT_EQ(kernels({.d = 64, .sinks = true}, false), plain);
  const auto more = without(kernels({.d = 64, .sinks = true}, true), plain);
  ASSERT_EQ(more.size(), 1u);
  EXPECT_TRUE(more.begin()->starts_with("backward/sinks.cu"));
  // The text of the kernel of sinks depends on the layout of rows, and on nothing else.
  const auto f16 = kernels({.dtype = DType::kF16, .d = 64}, false);
  EXPECT_EQ(without(kernels({.dtype = DType::kF16, .d = 64, .sinks = true}, true), f16), more);
  EXPECT_NE(without(kernels({.d = 64, .packed = true, .sinks = true}, true), packed), more);
}

TEST(BackwardPlan, DetailsSayWhatIsDecided) {
  const Family* const families[] = {&backward_family()};
  const auto details = [&](const Problem& p) {
    Reasons reasons;
    const Candidates all = ranked(p, families, {}, {}, &reasons);
    const auto& plan = dynamic_cast<const BackwardCandidate&>(*all.at(0)).plan();
    return with_reasons(describe(plan), reasons).details;
  };
  Details d = details(backward_problem({.sq = 4096, .sk = 4096, .hk = 8, .d = 128}));
  EXPECT_EQ(d.get<std::string>("kernel"), "sm90_backward_atomic");
  EXPECT_EQ(d.get<int64_t>("Br"), 64);
  EXPECT_EQ(d.get<int64_t>("Bc"), 128);
  EXPECT_EQ(d.get<std::string>("tile_from"), "cost_model");
  EXPECT_EQ(d.get<std::string>("dq"), "atomic");
  EXPECT_FALSE(d.get<bool>("deterministic"));
  EXPECT_FALSE(d.get<bool>("dsinks"));
  EXPECT_FALSE(d.has("copies"));
  EXPECT_FALSE(d.has("stores_elements"));

  d = details(backward_problem({.sq = 4096, .sk = 4096, .d = 128}, {.deterministic = true}));
  EXPECT_EQ(d.get<std::string>("dq"), "ordered");
  EXPECT_TRUE(d.get<bool>("deterministic"));

  const ForwardShape many = {.batch = 64, .sq = 256, .sk = 256, .hk = 8, .d = 128};
  d = details(backward_problem(many, {.deterministic = true}));
  EXPECT_EQ(d.get<std::string>("dq"), "stored");
  EXPECT_TRUE(d.get<bool>("deterministic"));
  EXPECT_EQ(d.get<int64_t>("waves"), 1);
  EXPECT_EQ(d.get<int64_t>("wave_heads"), 8);
  EXPECT_EQ(d.get<int64_t>("wave_sequences"), 64);
  EXPECT_FALSE(d.get<bool>("waves_split_rows"));
  EXPECT_EQ(d.get<int64_t>("splits"), 1);

  d = details(backward_problem({.batch = 1, .hk = 1, .d = 128}));
  EXPECT_GT(d.get<int64_t>("splits"), 1);
  EXPECT_EQ(d.get<int64_t>("splits") * d.get<int64_t>("split_q_heads"),
            8 * d.get<int64_t>("row_splits"));

  d = details(backward_problem({.d = 256}));
  EXPECT_TRUE(d.get<bool>("wide"));
  EXPECT_EQ(d.get<std::string>("dq"), "stored");

  d = details(backward_problem(
      {.batch = 1, .sq = 65536, .sk = 65536, .hq = 1, .hk = 1, .invariant = true}));
  EXPECT_TRUE(d.get<bool>("waves_split_rows"));

  d = details(backward_problem({.d = 17}));
  for (const char* name : {"copies.q", "copies.k", "copies.v", "copies.dout"}) {
    EXPECT_TRUE(d.has(name)) << name;
  }
  EXPECT_TRUE(d.get<bool>("stores_elements"));
  EXPECT_TRUE(details(backward_problem({.sinks = true}, {.dsinks = true})).get<bool>("dsinks"));
}

TEST(BackwardPlan, TakesTheFastestFormThatFits) {
  const Family* const families[] = {&backward_family()};
  const Problem p = backward_problem({.batch = 4, .sq = 1000, .sk = 1500, .hq = 2, .hk = 2});
  Reasons reasons;
  const auto all_within = [&](int64_t bytes) {
    reasons = {};
    return ranked(within(p, bytes), families, {}, {}, &reasons);
  };
  const int64_t accumulated = bytes_of(p, plans(p).at(0)), most = bytes_of(p, stored(p));
  const int64_t least = min_bytes(p);
  ASSERT_LT(least, accumulated);
  ASSERT_LT(accumulated, most);
  EXPECT_EQ(all_within(0).size(), 3u);
  for (const int64_t bytes : {accumulated, most - 1, most}) {
    EXPECT_EQ(all_within(bytes).at(0)->tile.family, "sm90_backward_atomic");
  }
  // With less, only dS in smaller waves fits; each other form has a reason.
  for (const int64_t bytes : {accumulated - 1, least}) {
    const Candidates all = all_within(bytes);
    ASSERT_EQ(all.size(), 1u);
    EXPECT_EQ(all[0]->tile.family, "sm90_backward_stored");
    EXPECT_LE(all[0]->workspace, bytes);
    EXPECT_GE(reasons.rejected.size(), 2u);
  }
  // With less than any form wants, the smallest workspace is what an error says.
  for (const auto& candidate : all_within(least - 1)) EXPECT_EQ(candidate->workspace, least);
}

TEST(BackwardPlan, RejectsWhatItDoesNotCompute) {
  const auto rejects = [](const ForwardShape& shape) {
    return !backward_rejects(backward_problem(shape)).empty();
  };
  EXPECT_FALSE(rejects({}));
  EXPECT_FALSE(rejects({.d = 256}));
  EXPECT_TRUE(rejects({.dtype = DType::kF32}));
  EXPECT_TRUE(rejects({.d = 264}));
  EXPECT_TRUE(rejects({.d = 64, .dv = 264}));
  EXPECT_TRUE(rejects({.batch = 1, .sq = 1, .sk = int64_t{1} << 29, .hq = 1, .hk = 1}));
}

// With tiles of a bias in shared memory, too, some plan has room for each pair of dims.
TEST(BackwardPlan, EveryDimFitsWithABias) {
  for (const DType bias : {DType::kF32, DType::kBF16, DType::kBool}) {
    for (const double dropout : {0.0, 0.1}) {
      for (int64_t d = 16; d <= 256; d += 16) {
        for (int64_t dv = 16; dv <= 256; dv += 16) {
          std::vector<std::string> rejected;
          const Problem p = backward_problem({.d = d, .dv = dv, .dropout = dropout, .bias = bias});
          EXPECT_FALSE(backward_candidates(p, {}, &rejected).empty()) << d << " " << dv;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::cuda
