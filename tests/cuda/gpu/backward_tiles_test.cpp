// The backward pass of the case list by every tile, of which the cost model takes one by the shape:
// dQ accumulated atomically and in order, and from stored dS.
#include "call/make_problem.h"
#include "cuda/portable/backward.h"
#include "cuda/sm90/backward_candidates.h"
#include "every_tile.h"

namespace fulgur::test {

namespace portable = cuda::portable;
namespace sm90 = cuda::sm90;
namespace {

class BackwardTiles : public OnGpu, public testing::WithParamInterface<Case> {};
class BackwardSplits : public OnGpu {};
class BackwardWide : public OnGpu, public testing::WithParamInterface<Case> {};
class BackwardShort : public OnGpu {};

// Cases that more than one tile computes.
std::vector<Case> chosen(std::vector<Case> cases) {
  std::erase_if(cases, [](const Case& c) {
    return c.dtype == DType::kF64 || c.tree != Tree::kNone || c.d > 128 || c.dv > 128;
  });
  return cases;
}
std::string name(const testing::TestParamInfo<Case>& info) { return info.param.name(); }

TEST_P(BackwardTiles, FollowReference) {
  const Case& c = GetParam();
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  run_backward_tiles(w, expect(w));
}

INSTANTIATE_TEST_SUITE_P(Small, BackwardTiles, testing::ValuesIn(chosen(small_cases())), name);
INSTANTIATE_TEST_SUITE_P(Large, BackwardTiles, testing::ValuesIn(chosen(large_cases())), name);

// Kv heads whole, as with enough key blocks for the SMs that are planned for, and in splits of
// their q heads and rows, as with few.
TEST_F(BackwardSplits, WholeAndSplitKvHeads) {
  const Case group{.dtype = DType::kBF16, .batch = 2, .sq = 200, .sk = 270, .hq = 8, .hk = 2};
  const Case rows{.dtype = DType::kF16, .batch = 1, .sq = 1500, .sk = 150, .hq = 2, .hk = 2};
  std::vector<Case> cases = {group, group, group, rows, rows};
  cases[0].mask = causal();
  cases[0].dropout = 0.1;
  cases[1].d = cases[1].dv = 128;
  cases[1].mask = window(70, 0);
  cases[1].layout = Layout::kPacked;
  cases[2].d = 256;
  cases[2].dv = 100;
  cases[2].mask = causal();
  cases[2].seqused = true;
  cases[3].mask = window(-1, 1400);
  cases[4].d = cases[4].dv = 80;
  cases[4].seqused_q = true;
  std::set<std::string> seen;
  for (const int sms : {2, 132}) {
    for (const Case& c : cases) {
      Workload w(c, c.seed());
      w.options.engine = "cuda";
      run_backward_tiles(w, expect(w), sms);
      std::vector<std::string> rejected;
      for (const auto& [plan, cycles, tuned_only] : sm90::backward_candidates(
               make_problem(w.backward, w.options), {.sms = sms}, &rejected)) {
        const std::string family = plan.tile().family;
        seen.insert(family + (plan.reduces() ? " split" : " whole"));
        if (plan.row_splits > 1) seen.insert(family + " split by rows");
      }
    }
  }
  for (const std::string dq : {"atomic", "ordered", "stored"}) {
    for (const char* heads : {" whole", " split"}) {
      EXPECT_TRUE(seen.contains("sm90_backward_" + dq + heads)) << dq << heads;
    }
  }
  EXPECT_TRUE(seen.contains("sm90_backward_atomic split by rows"));
  EXPECT_TRUE(seen.contains("sm90_backward_ordered split by rows"));
}

/// The gradients by each portable tile, planned for so many SMs, with the same bits twice where the
/// call is deterministic. `look`: at each plan.
void run_portable_tiles(Workload& w, int sms,
                        const std::function<void(const portable::BackwardPlan&)>& look) {
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  cuda::Card card = cuda::card_of(gpu);
  card.sms = sms;
  w.options.engine = "cuda";
  const Expected expected = expect(w);
  EngineMemory memory("cuda");
  const BackwardArgs args = memory.at(w.backward);
  const Problem problem = make_problem(args, memory.options(w.backward, w.options));
  std::vector<std::string> rejected;
  for (const auto& tile : portable::backward_candidates(problem, card, &rejected)) {
    look(tile.plan);
    const auto executable = portable::BackwardCandidate(problem, tile).executable(gpu, {});
    const auto gradients = [&] {
      w.seal();
      w.run_forward();
      memory.send();
      executable->run(&args, w.run_options);
      memory.bring_back();
      EXPECT_TRUE(w.check_memory());
      EXPECT_TRUE(backward_is_right(w, expected)) << tile.plan.tile().text();
      return std::array{bits(w.backward.dq), bits(w.backward.dk), bits(w.backward.dv)};
    };
    const auto first = gradients();
    if (!w.options.deterministic) continue;
    EXPECT_EQ(gradients(), first) << tile.plan.tile().text();
  }
}

// The portable kernels where CTAs share the q heads of a kv head: each tile, planned for so many
// SMs that it pays. In a fixed order of additions the bits are the same in every run.
TEST_F(BackwardSplits, PortableKernelsShareQHeads) {
  const Case shape{.dtype = DType::kBF16, .batch = 1, .sq = 500, .sk = 200, .hq = 4, .hk = 1};
  std::vector<Case> cases(6, shape);
  cases[4].dtype = cases[5].dtype = DType::kF32;
  cases[4].sq = cases[5].sq = 70;
  cases[4].sk = cases[5].sk = 150;
  cases[4].mask = causal();
  cases[4].dropout = 0.1;
  cases[5].d = 256;
  cases[5].dv = 100;
  cases[5].softcap = 3;
  cases[0].mask = causal();
  cases[0].dropout = 0.1;
  cases[1].dtype = DType::kF16;
  cases[1].batch = 2;
  cases[1].hq = 12;
  cases[1].hk = 2;
  cases[1].d = cases[1].dv = 128;
  cases[1].layout = Layout::kPacked;
  cases[1].mask = window(300, 20);
  cases[2].d = 50;
  cases[2].dv = 80;
  cases[2].seqused = cases[2].seqused_q = true;
  cases[2].dlse = true;
  cases[3].mask = causal();
  cases[3].d = 192;
  cases[3].dv = 256;
  for (const bool deterministic : {false, true}) {
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name());
      Workload w(c, c.seed());
      w.options.deterministic = deterministic;
      run_portable_tiles(w, 132, [](const portable::BackwardPlan& plan) {
        EXPECT_GT(plan.splits, 1) << plan.tile().text();
      });
    }
  }
}

// Wide heads: every option, and sizes that no tile divides.
std::vector<Case> wide_cases() {
  const Case shape{.dtype = DType::kBF16,
                   .batch = 1,
                   .sq = 70,
                   .sk = 130,
                   .hq = 2,
                   .hk = 2,
                   .d = 512,
                   .dv = 512};
  std::vector<Case> cases(9, shape);
  cases[0].mask = causal();
  cases[0].dropout = 0.1;
  cases[1].d = 576;
  cases[1].hq = 4;
  cases[1].hk = 1;
  cases[1].dtype = DType::kF16;
  cases[1].dlse = true;
  cases[2].batch = 3;
  cases[2].d = 300;
  cases[2].dv = 260;
  cases[2].layout = Layout::kPacked;
  cases[2].mask = window(70, 9);
  cases[2].softcap = 3;
  cases[3].batch = 2;
  cases[3].d = 40;
  cases[3].dv = 500;
  cases[3].seqused = cases[3].seqused_q = true;
  cases[3].mask = causal();
  cases[4].dv = 64;
  cases[4].alibi = Alibi::kHeads;
  cases[4].sinks = true;
  cases[4].mask = chunked(50, causal());
  cases[5].d = 257;
  cases[5].dv = 129;
  cases[5].sq = 130;
  cases[5].sk = 60;
  cases[5].hq = 4;
  cases[5].mask = top_left(causal());
  cases[6].sq = 0;
  cases[7].sk = 0;
  cases[8].sq = 3;
  cases[8].hq = 1;
  cases[8].hk = 1;
  cases[8].d = 304;
  cases[8].mask = window(-1, 2);
  return cases;
}

// By every tile, planned for so many SMs that CTAs share the q heads of a kv head where there are
// several. The forward pass of wide heads lacks dropout on GPUs; the CPU computes it.
TEST_P(BackwardWide, FollowReference) {
  const Case& c = GetParam();
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  const Expected e = expect(w);
  const auto forward = [&] {
    w.options.engine = "cpu";
    w.run_forward();
    w.options.engine = "cuda";
  };
  std::set<std::string> seen;
  run_tiles<BackwardArgs>(
      w, w.backward, seen, forward, [&] { return backward_is_right(w, e); }, 132);
  EXPECT_FALSE(seen.empty());
}

INSTANTIATE_TEST_SUITE_P(Wide, BackwardWide, testing::ValuesIn(wide_cases()), name);

// Above d 128, with a right bound and more key blocks than a few for each SM, the last block of a
// head adds first, and each begins at its diagonal.
TEST_F(BackwardSplits, PortableBlocksDescend) {
  const Case shape{.dtype = DType::kBF16, .batch = 2, .sq = 130, .sk = 150, .hq = 2, .hk = 2};
  std::vector<Case> cases(4, shape);
  cases[3].dtype = DType::kF32;
  cases[3].d = 192;
  cases[3].dv = 150;
  cases[3].mask = causal();
  cases[0].d = cases[0].dv = 256;
  cases[0].mask = causal();
  cases[1].dtype = DType::kF16;
  cases[1].hq = 4;
  cases[1].d = 130;
  cases[1].dv = 192;
  cases[1].layout = Layout::kPacked;
  cases[1].mask = window(90, 20);
  cases[2].d = cases[2].dv = 192;
  cases[2].mask = causal();
  cases[2].seqused = cases[2].seqused_q = true;
  cases[2].dropout = 0.1;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    w.options.deterministic = true;
    run_portable_tiles(w, 1, [](const portable::BackwardPlan& plan) {
      const bool descends = plan.key_blocks.order == kernels::kDescending;
      EXPECT_EQ(descends, plan.roles == 2) << plan.tile().text();
    });
  }
}

// Many key blocks of a head follow each other through its steps: dK comes before dQ.
TEST_F(BackwardSplits, PortableBlocksOfLongHeads) {
  const Case c{.dtype = DType::kBF16,
               .sq = 10,
               .sk = 4200,
               .hq = 1,
               .hk = 1,
               .d = 200,
               .dv = 200,
               .mask = causal()};
  Workload w(c, c.seed());
  w.options.deterministic = true;
  run_portable_tiles(w, 2, [](const portable::BackwardPlan& plan) {
    EXPECT_TRUE(plan.dk_first) << plan.tile().text();
  });
}

constexpr int kFew = 3;  // SMs that calls with cut blocks are planned for

std::vector<cuda::Fitting<sm90::BackwardPlan>> tiles_of(const Workload& w) {
  std::vector<std::string> rejected;
  return sm90::backward_candidates(make_problem(w.backward, w.options), {.sms = kFew}, &rejected);
}

/// dK and dV by the first tile, exactly.
std::pair<std::vector<double>, std::vector<double>> key_gradients(
    Workload& w, const std::function<testing::AssertionResult()>& is_right) {
  std::pair<std::vector<double>, std::vector<double>> gradients;
  std::set<std::string> seen;  // the other tiles
  const auto tiles = tiles_of(w);
  for (size_t i = 1; i < tiles.size(); ++i) seen.insert(tiles[i].plan.tile().text());
  // The bound on the workspace is the backward pass's: with it the forward pass might not split
  // keys.
  const auto forward = [&] {
    const int64_t most = std::exchange(w.options.max_workspace, 0);
    w.run_forward();
    w.options.max_workspace = most;
  };
  const auto keep = [&] {
    gradients = {read(w.backward.dk), read(w.backward.dv)};
    return is_right();
  };
  run_tiles<BackwardArgs>(w, w.backward, seen, forward, keep, kFew);
  return gradients;
}

/// Whether the call's last key blocks are cut, and dK and dV have the bits of whole blocks. The
/// call has whole blocks if its workspace has no room for partial dK and dV.
testing::AssertionResult cut_keeps_bits(Workload& w,
                                        const std::function<testing::AssertionResult()>& is_right) {
  w.options.engine = "cuda";
  const sm90::BackwardPlan cut = tiles_of(w).at(0).plan;
  if (cut.cut_blocks != kFew - 1) return testing::AssertionFailure() << "nothing is cut";
  const auto of_cut_blocks = key_gradients(w, is_right);
  w.options.max_workspace = sm90::workspace_of(make_problem(w.backward, w.options), cut).end - 1;
  const sm90::BackwardPlan whole = tiles_of(w).at(0).plan;
  if (whole.cut_blocks > 0 || whole.splits > 1) return testing::AssertionFailure() << "no blocks";
  if (key_gradients(w, is_right) != of_cut_blocks)
    return testing::AssertionFailure() << "other bits";
  return testing::AssertionSuccess();
}

const Case kCutCase{
    .dtype = DType::kBF16, .batch = 1, .sq = 500, .sk = 890, .hq = 4, .hk = 1, .d = 128, .dv = 128};

// The last key blocks are two work tiles each: the second one continues from partial dK and dV of
// the first one, in the same order of rows.
TEST_F(BackwardSplits, LastBlocksAreCut) {
  std::vector<Case> cases(4, kCutCase);
  cases[1].dtype = DType::kF16;
  cases[1].sq = 1500;
  cases[1].d = cases[1].dv = 64;
  cases[2].batch = 2;
  cases[2].sk = 600;
  cases[2].seqused = cases[2].seqused_q = true;
  cases[3].sq = 900;
  cases[3].d = 50;
  cases[3].dv = 80;
  cases[3].dropout = 0.1;
  for (const Case& c : cases) {
    Workload w(c, c.seed());
    const Expected expected = expect(w);
    EXPECT_TRUE(cut_keeps_bits(w, [&] { return backward_is_right(w, expected); })) << c.name();
  }
}

// Sequences with whole blocks have no keys, so that second parts are taken at once.
TEST_F(BackwardSplits, SecondPartsWaitForFirstParts) {
  Case c = kCutCase;
  c.batch = 5;
  c.sk = 256;
  c.seqused = true;
  Workload w(c, c.seed());
  void* const lengths = const_cast<void*>(w.forward.seqused_k.data);
  for (int64_t b = 0; b < c.batch - 1; ++b) store(lengths, DType::kI32, b, 0);
  EXPECT_TRUE(cut_keeps_bits(w, [] { return testing::AssertionSuccess(); }));
}

// One consumer warpgroup a CTA: short calls with one q head a kv head, planned for so many SMs that
// each key block has one.
TEST_F(BackwardShort, OneWarpgroupACta) {
  const Case shape{.dtype = DType::kBF16,
                   .batch = 2,
                   .sq = 200,
                   .sk = 170,
                   .hq = 2,
                   .hk = 2,
                   .d = 128,
                   .dv = 128};
  std::vector<Case> cases(6, shape);
  cases[0].mask = causal();
  cases[1].dtype = DType::kF16;
  cases[1].d = cases[1].dv = 64;
  cases[1].mask = window(70, 30);
  cases[1].layout = Layout::kPacked;
  cases[2].d = 50;
  cases[2].dv = 80;
  cases[2].dropout = 0.1;
  cases[2].seqused = cases[2].seqused_q = true;
  cases[3].d = cases[3].dv = 64;
  cases[3].softcap = 20;
  cases[3].mask = causal();
  cases[3].dlse = true;
  cases[4].sq = 64;
  cases[4].sk = 300;
  cases[4].sinks = true;
  cases[5].batch = 1;
  cases[5].sq = 1024;
  cases[5].sk = 100;
  bool splits_rows = false;
  for (const Case& c : cases) {
    Workload w(c, c.seed());
    w.options.engine = "cuda";
    std::vector<std::string> rejected;
    std::set<std::string> others;
    int short_tiles = 0;
    for (const auto& [plan, cycles, tuned_only] :
         sm90::backward_candidates(make_problem(w.backward, w.options), {.sms = 132}, &rejected)) {
      if (plan.consumers != 1) {
        others.insert(plan.tile().text());
        continue;
      }
      ++short_tiles;
      splits_rows = splits_rows || plan.row_splits > 1;
    }
    EXPECT_EQ(short_tiles, 1) << c.name();
    const Expected e = expect(w);
    run_tiles<BackwardArgs>(
        w, w.backward, others, [&] { w.run_forward(); }, [&] { return backward_is_right(w, e); },
        132);
  }
  EXPECT_TRUE(splits_rows);
}

// dQ is rounded, and what a hidden NaN has reached is repaired, by the kernel by keys: planned for
// so many SMs that each key block has one. Rows end inside of tiles; key blocks that begin at
// different rows, one row tile alone, more keys than rows.
TEST_F(BackwardShort, KernelByKeysRoundsDq) {
  const Case shape{
      .dtype = DType::kBF16, .batch = 2, .sq = 300, .sk = 300, .hq = 2, .hk = 2, .d = 64, .dv = 64};
  std::vector<Case> cases(6, shape);
  cases[1].dtype = DType::kF16;
  cases[1].sq = 200;
  cases[1].sk = 170;
  cases[1].dropout = 0.1;
  cases[2].mask = causal();
  cases[3].sq = 70;
  cases[3].sk = 180;
  cases[3].d = 40;
  cases[3].mask = window(90, 20);
  cases[4].sq = 120;
  cases[4].sk = 130;
  cases[4].d = cases[4].dv = 128;
  cases[4].mask = causal();
  cases[5].sq = 60;
  cases[5].d = 96;
  cases[5].dv = 80;
  for (const Case& c : cases) {
    for (const bool poisoned : {false, true}) {
      if (poisoned && c.mask.right < 0) continue;
      Workload w(c, c.seed());
      w.options.engine = "cuda";
      if (poisoned) {  // the first row, which few keys see
        std::vector<double> dout = read(w.backward.dout);
        dout[3] = std::numeric_limits<double>::quiet_NaN();
        write(w.backward.dout, dout);
      }
      std::vector<std::string> rejected;
      std::set<std::string> others;
      int rounding = 0;
      for (const auto& [plan, cycles, tuned_only] : sm90::backward_candidates(
               make_problem(w.backward, w.options), {.sms = 132}, &rejected)) {
        rounding += plan.rounds_dq;
        if (!plan.rounds_dq) others.insert(plan.tile().text());
      }
      EXPECT_GT(rounding, 0) << c.name();
      const Expected e = expect(w);
      run_tiles<BackwardArgs>(
          w, w.backward, others, [&] { w.run_forward(); }, [&] { return backward_is_right(w, e); },
          132);
    }
  }
}

}  // namespace
}  // namespace fulgur::test
