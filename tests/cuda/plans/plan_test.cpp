// What the CUDA engine decides: tiles, stages and shares of work.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "cuda/decode/candidates.h"
#include "cuda/decode/family.h"
#include "cuda/decode/rejects.h"
#include "cuda/device/launch_memory.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/shape_class.h"
#include "cuda/sm90/backward_candidates.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/families.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/forward_candidates.h"
#include "cuda/sm90/forward_cost.h"
#include "cuda/sm90/forward_rejects.h"
#include "engines.h"
#include "forward_call.h"
#include "kernels/host_device/key_walk.h"

namespace fulgur::cuda {
namespace {

using namespace decode;
using namespace sm90;

using test::forward_problem;

/// The plan that is chosen, and why.
struct Choice {
  ForwardPlan plan;
  Reasons reasons;
};

Choice choose(const Problem& problem, const Card& card = {},
              std::span<const MeasuredTile> measured = {}) {
  const Family* const families[] = {&forward_family()};
  Choice choice;
  const Candidates candidates = ranked(problem, families, card, measured, &choice.reasons);
  choice.plan = dynamic_cast<const ForwardCandidate&>(*candidates.at(0)).plan();
  return choice;
}

ForwardPlan plan_of(const Problem& problem, const Card& card = {}) {
  return choose(problem, card).plan;
}

/// The plans of the tiles that fit.
std::vector<ForwardPlan> fitting(const Problem& problem) {
  std::vector<std::string> rejected;
  std::vector<ForwardPlan> plans;
  for (const Fitting<ForwardPlan>& tile : forward_candidates(problem, {}, &rejected))
    plans.push_back(tile.plan);
  return plans;
}

std::vector<Problem> many_problems() {
  std::vector<Problem> all;
  for (const int64_t d : {1, 16, 40, 64, 96, 128, 192, 256}) {
    for (const int64_t s : {1, 63, 512, 4096, 100000}) {
      for (const Mask& mask : {full(), causal(), window(100, 0)}) {
        for (const int64_t batch : {1, 3, 64}) {
          const int64_t dim = (d + 7) / 8 * 8;
          all.push_back(
              forward_problem({.batch = batch, .sq = s, .sk = s, .d = dim, .mask = mask}));
        }
      }
    }
  }
  return all;
}

TEST(Sm90Plan, FitsTheMachine) {
  for (const Problem& p : many_problems()) {
    for (const ForwardPlan& plan : fitting(p)) {
      EXPECT_LE(plan.shared_bytes, 232448);
      EXPECT_TRUE(plan.q_stages == 2 || p.d > 128);
      EXPECT_GE(plan.k_stages, 2);
      EXPECT_GE(plan.v_stages, 2);
      EXPECT_EQ(plan.block_keys % 16, 0);
      EXPECT_LE(plan.block_keys, 256);
      // All registers of an SM, as setmaxnreg shares them out.
      EXPECT_LE(128 * (plan.producer_registers + plan.consumers * plan.consumer_registers), 65536);
      EXPECT_LE(plan.counters() * 4, LaunchMemory::kZeroed);
    }
  }
}

TEST(Sm90Plan, SharesOutEveryTile) {
  for (const Problem& p : many_problems()) {
    const ForwardPlan plan = plan_of(p);
    const int64_t heads = plan.block_heads(p);
    EXPECT_TRUE(heads == 1 || heads == p.group());
    const int64_t strips = (p.sq + 63) / 64 * heads;
    EXPECT_EQ(kernels::blocks_of(plan.work),
              (strips + plan.consumers - 1) / plan.consumers * p.batch * p.hq / heads);
    EXPECT_EQ(plan.work.q_tiles, kernels::blocks_of(plan.work) +
                                     kernels::split_blocks(plan.work) * (plan.work.splits - 1));
    EXPECT_EQ(plan.split_tail, kernels::split_blocks(plan.work) > 0);
    EXPECT_TRUE(!plan.split_tail || (plan.work.splits >= 2 && plan.work.splits <= 8));
    const int at_once = 132 * (plan.shares ? plan.residents : 1);
    EXPECT_LT(kernels::split_blocks(plan.work), at_once);
    EXPECT_EQ(plan.grid, std::min(at_once, plan.work.q_tiles));
    EXPECT_EQ(plan.work.section_heads, p.group() / heads);
    EXPECT_GE(plan.work.bulk_heads, 0);
    EXPECT_LT(plan.work.bulk_heads, plan.work.heads);  // there is a last section
    EXPECT_EQ(plan.work.bulk_heads % plan.work.section_heads, 0);
  }
}

TEST(Sm90Plan, TakesTheCheapestAndNamesTheOthers) {
  const Reasons reasons =
      choose(forward_problem({.sq = 16384, .sk = 16384, .hq = 16, .hk = 16})).reasons;
  EXPECT_EQ(reasons.details.get<std::string>("tile_from"), "cost_model");
  int slower = 0, wider = 0;
  for (const std::string& why : reasons.rejected) {
    EXPECT_TRUE(why.starts_with("tile sm90_forward ")) << why;
    const bool wide = why.find("d or dv above 128") != std::string::npos;
    wider += wide;
    slower += !wide;
  }
  EXPECT_EQ(slower, 3);
  EXPECT_EQ(wider, 2);
}

// Blocks are cut where max_workspace has room for what their splits leave.
TEST(Sm90Plan, CutsNoBlocksWithoutRoomForTheirParts) {
  for (const Mask& mask : {full(), causal()}) {
    Problem p = forward_problem({.batch = 1, .sq = 192, .sk = 65536, .hq = 4, .mask = mask});
    const ForwardPlan cut = plan_of(p);
    ASSERT_TRUE(cut.split_tail);
    const int64_t wanted = workspace_of(p, cut).end;
    p.max_workspace = wanted;
    EXPECT_EQ(plan_of(p), cut);
    p.max_workspace = LaunchMemory::kZeroed;
    const ForwardPlan whole = plan_of(p);
    EXPECT_FALSE(whole.split_tail);
    EXPECT_EQ(workspace_of(p, whole).end, p.max_workspace);
    EXPECT_EQ(whole.work.q_tiles, kernels::blocks_of(whole.work));
  }
}

// A bool mask comes as bits where that is faster: of long calls, if heads share it.
TEST(Sm90Plan, PacksLongBoolMasksThatHeadsShare) {
  const auto masked = [](test::ForwardShape shape, bool of_heads = false) {
    shape.bias = DType::kBool;
    Problem p = forward_problem(shape);
    if (!of_heads) p.bias.head = 0;
    return p;
  };
  const test::ForwardShape longer{.batch = 4, .sq = 4096, .sk = 4096, .hq = 16, .hk = 16};
  const Problem p = masked(longer);
  const ForwardPlan bits = plan_of(p);
  EXPECT_TRUE(bits.mask_bits && bits.maps_tiles);
  EXPECT_EQ(bits.tile().text(), "sm90_forward_bits 192 x 80");  // that of a plain call
  EXPECT_GE(workspace_of(p, bits).end, 4096 * 4096 / 8);
  EXPECT_TRUE(describe(bits).details.get<bool>("packs_mask"));
  EXPECT_FALSE(plan_of(masked({.batch = 1, .sq = 128, .sk = 128})).mask_bits);
  EXPECT_FALSE(plan_of(masked(longer, true)).mask_bits);
  test::ForwardShape other = longer;
  other.invariant = true;
  EXPECT_FALSE(plan_of(masked(other)).mask_bits);
  other = longer;
  other.packed = true;
  EXPECT_FALSE(plan_of(masked(other)).mask_bits);
  other = longer;
  other.max_workspace = 1 << 20;
  EXPECT_FALSE(plan_of(masked(other)).mask_bits);
  EXPECT_FALSE(plan_of(forward_problem({.sq = 4096, .sk = 4096, .bias = DType::kBF16})).mask_bits);
}

// Products add a bias of bf16 to scores of up to 64 dims: 1 / scale is a bf16, or two. Those of the
// least bf16 have to be -inf, and finite.
TEST(Sm90Plan, ProductsAddABias) {
  const auto terms = [](int64_t d, std::optional<double> scale = {}, DType bias = DType::kBF16,
                        bool invariant = false) {
    return plan_of(forward_problem({.batch = 4,
                                    .sq = 4096,
                                    .sk = 4096,
                                    .hq = 16,
                                    .hk = 16,
                                    .d = d,
                                    .scale = scale,
                                    .invariant = invariant,
                                    .bias = bias}))
        .bias_terms;
  };
  EXPECT_EQ(terms(64), 1);
  EXPECT_EQ(terms(64, 0.3), 2);
  EXPECT_EQ(terms(64, 0.7), 0);
  EXPECT_EQ(terms(64, 0.0077), 0);
  EXPECT_EQ(terms(64, 0x1p-8), 1);
  EXPECT_EQ(terms(64, {}, DType::kF16), 0);
  EXPECT_EQ(terms(64, {}, DType::kBF16, true), 0);
  EXPECT_EQ(terms(128), 0);
}

// With a bias whose words are read into the registers of P, blocks of the last round are cut, or of
// two strips.
TEST(Sm90Plan, FillsTheLastRoundWithABias) {
  const auto plan = [](int64_t batch, int64_t s, const Mask& mask = full(), int64_t d = 128) {
    return plan_of(forward_problem({.batch = batch,
                                    .sq = s,
                                    .sk = s,
                                    .hq = 2048 / d,
                                    .hk = 2048 / d,
                                    .d = d,
                                    .mask = mask,
                                    .bias = DType::kBF16}));
  };
  const ForwardPlan shorter = plan(1, 4096);
  EXPECT_TRUE(shorter.bias_in_p() && shorter.pairs && !shorter.split_tail);
  EXPECT_EQ(shorter.work.row_blocks, 24);  // 16 of three strips, 8 of two: 1.9 and 1 rounds
  EXPECT_EQ(shorter.work.bulk_heads, 0);
  EXPECT_EQ(shorter.work.q_tiles, 384);
  EXPECT_EQ(shorter.grid, 132);
  for (const auto& [batch, s] : {std::pair{2, 8192}, {1, 16384}}) {
    const ForwardPlan cut = plan(batch, s);
    EXPECT_EQ(cut.work.row_blocks, kernels::blocks_of(s, 3));
    EXPECT_EQ(kernels::split_blocks(cut.work), 56);
    EXPECT_EQ(cut.work.splits, 2);
  }
  // Of many rounds shorter blocks cost more than they gain, and 88 blocks are too many to be cut.
  // Under a band blocks are of different lengths anyway.
  for (const ForwardPlan& whole : {plan(4, 4096), plan(4, 4096, causal()), plan(1, 4096, causal()),
                                   plan(1, 4096, full(), 64)}) {
    EXPECT_EQ(whole.work.row_blocks, 22);
    EXPECT_FALSE(whole.split_tail);
  }
}

// The tile of an invariant call must not depend on the batch, and so not on what a workspace takes.
TEST(Sm90Plan, AllTilesOfInvariantCallsWantTheSame) {
  for (const int64_t batch : {1, 50}) {
    const Problem p = forward_problem({.batch = batch, .sq = 300, .sk = 9000, .invariant = true});
    for (const ForwardPlan& plan : fitting(p))
      EXPECT_EQ(workspace_of(p, plan).end, workspace_of(p, fitting(p)[0]).end);
  }
}

TEST(Sm90Plan, NoTileIsAnErrorThatSaysWhy) {
  const auto plan = [] { plan_of(forward_problem({.d = 256}), {.shared_bytes = 50000}); };
  EXPECT_EQ(test::status_of(plan), Status::kUnsupported);
  const std::string why = test::message_of(plan);
  EXPECT_NE(why.find("engine cuda: no tile computes this: tile sm90_forward 128 x 64: two stages"),
            std::string::npos)
      << why;
}

/// Times of every tile of a problem; `fastest` takes 10 us, the others 20, 30 and so on.
std::vector<MeasuredTile> measured(const Problem& p, size_t fastest) {
  std::vector<MeasuredTile> tiles;
  for (const ForwardPlan& plan : fitting(p)) {
    const double us = tiles.size() == fastest ? 10 : 20 + 10.0 * static_cast<double>(tiles.size());
    tiles.push_back({plan.tile(), us});
  }
  return tiles;
}

/// Whether the tile that was tuned is among what is rejected.
bool rejects_tuned(const Reasons& reasons) {
  return std::ranges::any_of(reasons.rejected, [](const std::string& why) {
    return why.starts_with("tile tuned on this device: ");
  });
}

TEST(Sm90Plan, TakesTheTileThatWasMeasuredToBeFastest) {
  int other = 0;
  for (const Problem& p : many_problems()) {
    const std::vector<ForwardPlan> all = fitting(p);
    const ForwardPlan predicted = plan_of(p);
    for (size_t i = 0; i < all.size(); ++i) {
      const auto [plan, reasons] = choose(p, {}, measured(p, i));
      EXPECT_EQ(reasons.details.get<std::string>("tile_from"), "tuning");
      EXPECT_DOUBLE_EQ(reasons.details.get<double>("measured_us"), 10);
      EXPECT_EQ(reasons.rejected.size(), all.size() - 1);
      for (const std::string& why : reasons.rejected) {
        EXPECT_TRUE(why.starts_with("tile sm90_forward ")) << why;
      }
      EXPECT_EQ(plan, all[i]);
      other += plan != predicted;
    }
  }
  EXPECT_GT(other, 100);
}

TEST(Sm90Plan, TunedTilesThatAreNotItsOwnAreNamed) {
  const Problem p = forward_problem({});
  std::vector<MeasuredTile> less = measured(p, 1), more = less, others = less;
  ASSERT_GE(less.size(), 2u);
  less.pop_back();
  more.push_back({{"sm90_forward", 64, 16}, 1});
  others[0].tile.Bc += 16;
  for (const auto& tiles : {less, more, others}) {
    const Choice choice = choose(p, {}, tiles);
    EXPECT_EQ(choice.plan, plan_of(p));
    EXPECT_TRUE(rejects_tuned(choice.reasons));
  }
}

TEST(Sm90Plan, InvariantTakesNoTunedTile) {
  for (const int64_t batch : {1, 64}) {
    const Problem p = forward_problem({.batch = batch, .invariant = true});
    for (size_t i = 0; i < fitting(p).size(); ++i) {
      const Choice choice = choose(p, {}, measured(p, i));
      EXPECT_EQ(choice.plan, plan_of(p));
      EXPECT_TRUE(rejects_tuned(choice.reasons));
    }
  }
}

TEST(ShapeClass, NamesAllThatTheTileDependsOn) {
  const auto of = [](const test::ForwardShape& shape) {
    return shape_class(forward_problem(shape));
  };
  EXPECT_EQ(of({}), "bf16 d 128 dv 128 sq 1024 sk 1024 heads 16 group 4");
  EXPECT_EQ(of({.sq = 1000, .sk = 900, .lse = false}), of({}));
  EXPECT_EQ(of({.d = 120}), of({}));
  EXPECT_EQ(of({.scale = 0.3}), of({}));
  EXPECT_EQ(of({.mask = window(1023, -1)}), of({}));  // binds nothing
  EXPECT_EQ(of({.mask = window(100, 0)}), of({}) + " left 112 right 0");
  EXPECT_EQ(of({.softcap = 30, .alibi = true, .packed = true, .seqused_q = true, .seqused = true}),
            of({}) + " transformed softcap alibi packed seqused_q seqused_k");
  EXPECT_EQ(of({.dropout = 0.5}), of({}) + " dropout");
  EXPECT_EQ(of({.dropout = 0.1}), of({.dropout = 0.5}));
  std::set<std::string> different;
  const std::vector<test::ForwardShape> shapes = {{},
                                                  {.dtype = DType::kF16},
                                                  {.batch = 3},
                                                  {.sq = 1025},
                                                  {.sq = 896},
                                                  {.sk = 1025},
                                                  {.hq = 10},
                                                  {.hk = 4},
                                                  {.d = 112},
                                                  {.dv = 64},
                                                  {.mask = causal()},
                                                  {.mask = window(100, -1)},
                                                  {.mask = window(200, -1)},
                                                  {.mask = window(-1, 7)},
                                                  {.scale = -1.0},
                                                  {.softcap = 1},
                                                  {.alibi = true},
                                                  {.packed = true},
                                                  {.seqused_q = true},
                                                  {.seqused = true}};
  for (const test::ForwardShape& shape : shapes) different.insert(of(shape));
  EXPECT_EQ(different.size(), shapes.size());
}

TEST(ShapeClass, FourClassesAnOctave) {
  std::vector<int64_t> last;  // of each class
  std::string before;
  for (int64_t sq = 1; sq <= 5000; ++sq) {
    const std::string now =
        shape_class(forward_problem({.batch = 1, .sq = sq, .hq = 2, .lse = false}));
    if (now != before && sq > 1) last.push_back(sq - 1);
    before = now;
  }
  EXPECT_EQ(last,
            (std::vector<int64_t>{1,   2,   3,    4,    5,    6,    7,    8,    10,   12,   14,
                                  16,  20,  24,   28,   32,   40,   48,   56,   64,   80,   96,
                                  112, 128, 160,  192,  224,  256,  320,  384,  448,  512,  640,
                                  768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096}));
}

// What was measured to be fastest on an H200.
TEST(Sm90Plan, TakesTheMeasuredTiles) {
  const auto tile = [](int64_t d, int64_t s, const Mask& mask) {
    const int64_t heads = 2048 / d, batch = 16384 / s;
    const ForwardPlan plan = plan_of(forward_problem(
        {.batch = batch, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = mask}));
    return std::pair(plan.consumers, plan.block_keys);
  };
  for (const Mask& mask : {full(), causal()}) {
    for (const int64_t s : {2048, 4096, 8192, 16384}) {
      EXPECT_EQ(tile(64, s, mask), std::pair(3, 128));
    }
    for (const int64_t s : {512, 1024}) EXPECT_EQ(tile(64, s, mask), std::pair(4, 64));
    EXPECT_EQ(tile(96, 16384, mask), std::pair(3, 96));
    EXPECT_EQ(tile(96, 512, mask), std::pair(3, 64));
    EXPECT_EQ(tile(128, 16384, mask), std::pair(3, 80));
    EXPECT_EQ(tile(128, 1024, mask), std::pair(3, 64));
    EXPECT_EQ(tile(192, 512, mask), std::pair(2, 64));
    EXPECT_EQ(tile(192, 2048, mask), std::pair(2, 64));
    EXPECT_EQ(tile(256, 4096, mask), std::pair(2, 64));
  }
}

// Tiles of calls with expressions are those measured, with score_mod if there are blocks for all
// SMs.
TEST(Sm90Plan, TakesTheMeasuredTilesOfExpressions) {
  const auto tile = [](int64_t s, int64_t batch, const char* score_mod, const char* mask_mod) {
    test::ForwardCall call = test::forward_call(
        {.batch = batch, .sq = s, .sk = s, .hq = 16, .hk = 16, .d = 64, .mask = causal()});
    if (score_mod != nullptr) call.options.score_mod = parse_expression(score_mod);
    if (mask_mod != nullptr) call.options.mask_mod = parse_expression(mask_mod);
    const ForwardPlan plan = plan_of(make_problem(call.args, call.options));
    return std::pair(plan.consumers, plan.block_keys);
  };
  constexpr const char* kScore = "score + 0.5 * abs(delta)";
  for (const int64_t s : {2048, 8192, 32768}) {
    EXPECT_EQ(tile(s, 32768 / s, kScore, nullptr), std::pair(3, 112));
    EXPECT_EQ(tile(s, 32768 / s, nullptr, "q // 1024 == k // 1024"), std::pair(4, 64));
    EXPECT_EQ(tile(s, 32768 / s, kScore, "q // 1024 == k // 1024"), std::pair(1, 128));
  }
  EXPECT_EQ(tile(512, 1, kScore, nullptr), std::pair(1, 128));
}

// Batch 1 and 2 of short sequences, on an H100: a warpgroup alone with its rows, two of them on a
// SM where there are more than 132 and their memory fits, and larger blocks where there
// is more to do.
TEST(Sm90Plan, SmallBlocksWhereThereAreFew) {
  const auto tile = [](int64_t d, int64_t s, int64_t heads, const Mask& mask) {
    const auto chosen = choose(forward_problem(
        {.batch = 1, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = mask}));
    return std::tuple(chosen.plan.consumers, chosen.plan.block_keys, chosen.plan.grid);
  };
  for (const Mask& mask : {full(), causal()}) {
    EXPECT_EQ(tile(64, 128, 16, mask), std::tuple(1, 128, 32));
    EXPECT_EQ(tile(64, 512, 16, mask), std::tuple(1, 128, 128));
    EXPECT_EQ(tile(64, 1024, 16, mask), std::tuple(1, 128, 256));
    EXPECT_EQ(tile(64, 512, 32, mask), std::tuple(1, 128, 256));
    EXPECT_EQ(tile(128, 128, 16, mask), std::tuple(1, 128, 32));
    EXPECT_EQ(tile(128, 512, 16, mask), std::tuple(1, 128, 128));
    EXPECT_EQ(std::get<0>(tile(128, 1024, 16, mask)), 2);
  }
  EXPECT_NE(std::get<0>(tile(64, 1024, 32, full())), 1);
}

TEST(Sm90Plan, DerivesTheMeasuredStages) {
  const auto stages = [](int64_t d, int64_t s) {
    const ForwardPlan plan =
        plan_of(forward_problem({.batch = 8, .sq = s, .sk = s, .hq = 8, .hk = 8, .d = d}));
    return std::array{plan.q_stages, plan.k_stages, plan.v_stages};
  };
  EXPECT_EQ(stages(64, 16384), (std::array{2, 4, 4}));
  EXPECT_EQ(stages(64, 1024), (std::array{2, 6, 6}));
  EXPECT_EQ(stages(96, 16384), (std::array{2, 3, 2}));
  EXPECT_EQ(stages(128, 16384), (std::array{2, 3, 3}));
  EXPECT_EQ(stages(128, 1024), (std::array{2, 4, 4}));
  EXPECT_EQ(stages(192, 16384), (std::array{1, 3, 2}));
  EXPECT_EQ(stages(192, 2048), (std::array{2, 3, 2}));
  EXPECT_EQ(stages(256, 4096), (std::array{1, 3, 2}));
}

TEST(Sm90Plan, BoundsThatBindNothingAreNone) {
  EXPECT_FALSE(plan_of(forward_problem({.sq = 1, .mask = causal()})).has_right);
  EXPECT_TRUE(plan_of(forward_problem({.sq = 2, .mask = causal()})).has_right);
  EXPECT_FALSE(plan_of(forward_problem({.mask = window(1023, -1)})).has_left);
  EXPECT_TRUE(plan_of(forward_problem({.mask = window(1022, -1)})).has_left);
  // There are 1024 keys. A chunk implies both bounds: those of the window, or of the chunk where
  // these are nearer.
  const auto chunks = [](int64_t chunk, const Mask& of, int64_t sq) {
    const ForwardPlan plan = plan_of(forward_problem({.sq = sq, .mask = chunked(chunk, of)}));
    EXPECT_TRUE(!plan.has_chunk || (plan.has_left && plan.has_right));
    return plan.has_chunk;
  };
  EXPECT_FALSE(chunks(1024, causal(), 1024));
  EXPECT_TRUE(chunks(1023, causal(), 1024));
  EXPECT_TRUE(chunks(1024, full(), 1024));  // of shorter sequences rows may be in front of all keys
  EXPECT_FALSE(chunks(1024, full(), 1));
  EXPECT_TRUE(chunks(1023, full(), 1));
  const kernels::Band around = band_of({.has_left = true, .has_right = true, .has_chunk = true},
                                       chunked(100, window(200, 20)));
  EXPECT_EQ(around.left, 99);
  EXPECT_EQ(around.right, 20);
  EXPECT_EQ(around.chunk, 100);
}

TEST(Sm90Plan, FewTilesAreSplit) {
  const ForwardPlan decode =
      plan_of(forward_problem({.batch = 1, .sq = 1, .sk = 65536, .hq = 32, .hk = 8}));
  EXPECT_TRUE(decode.split_tail);
  EXPECT_GE(decode.work.q_tiles, 100);
  const ForwardPlan invariant = plan_of(
      forward_problem({.batch = 1, .sq = 17, .sk = 65536, .hq = 32, .hk = 8, .invariant = true}));
  EXPECT_FALSE(invariant.split_tail);
}

// Less blocks than SMs, some of them long: the longest are cut, so that no q tile is.
TEST(Sm90Plan, FewBlocksUnderABandAreCut) {
  const auto plan = [](int64_t s, int64_t heads, const Mask& mask, bool invariant = false) {
    return plan_of(forward_problem({.batch = 1,
                                    .sq = s,
                                    .sk = s,
                                    .hq = heads,
                                    .hk = heads,
                                    .mask = mask,
                                    .invariant = invariant}));
  };
  const ForwardPlan few = plan(4096, 4, causal());
  EXPECT_TRUE(few.split_tail);
  EXPECT_EQ(few.work.first_split, 0);
  EXPECT_EQ(few.work.end_split % 4, 0);
  EXPECT_LT(few.work.end_split, kernels::blocks_of(few.work));  // short blocks stay whole
  EXPECT_GE(few.work.q_tiles, 132);
  EXPECT_EQ(few.grid, 132);
  const int keys = (4096 + few.block_keys - 1) / few.block_keys;
  int longest = 0;
  const kernels::Band band = band_of(few, causal());
  for (int i = 0; i < few.work.q_tiles; ++i) {
    const kernels::KeyTiles tiles =
        kernels::key_tiles_of(few.work, band, {0, 0, 4096, 4096}, few.consumers, few.block_keys,
                              true, kernels::q_tile_of(few.work, 4, true, band, i));
    longest = std::max(longest, tiles.end - tiles.begin);
  }
  EXPECT_LE(longest, keys / 2);
  EXPECT_FALSE(plan(4096, 4, causal(), true).split_tail);
  EXPECT_FALSE(plan(4096, 16, causal()).split_tail);  // enough blocks
  EXPECT_FALSE(plan(256, 4, causal()).split_tail);    // too short to pay
  EXPECT_FALSE(plan(4096, 4, window(200, 0)).split_tail);
}

TEST(Sm90Plan, InvariantDoesNotLookAtTheBatch) {
  const Family* const families[] = {&forward_family(), &invariant_by_rows_family()};
  const Mask masks[] = {full(),
                        causal(),
                        window(300, 0),
                        window(-1, 40),
                        window(1000000, 5),
                        window(int64_t{1} << 40, int64_t{1} << 40),
                        chunked(2000),
                        chunked(int64_t{1} << 40, causal())};
  for (const Mask& mask : masks) {
    for (const int64_t d : {64, 96, 128, 192, 256}) {
      for (const double softcap : {0, 30}) {
        for (const bool packed : {false, true}) {
          std::set<std::string> headers;
          for (const int64_t batch : {1, 2, 7, 64, 500}) {
            for (const int64_t sq : {17, 64, 500, 5000}) {  // fewer are the decode kernel's
              for (const int64_t sk : {1, 2, 500, 5000, 60000}) {
                const Problem p = forward_problem({.batch = batch,
                                                   .sq = sq,
                                                   .sk = sk,
                                                   .d = d,
                                                   .mask = mask,
                                                   .softcap = softcap,
                                                   .packed = packed,
                                                   .invariant = true});
                Reasons reasons;
                const Candidates ranked_now = ranked(p, families, {}, {}, &reasons);
                headers.insert(ranked_now.at(0)->kernels().at(0).request.kernel_config);
                // Bounds are those of the mask, or such that no row reaches: never of the batch.
                const kernels::Band band = band_of(kernel_key(p), mask);
                const int64_t left = mask.chunk > 0 ? mask.chunk - 1 : mask.left,
                              most = (1 << 30) - 1024;
                EXPECT_EQ(band.left, left < 0 ? 0 : std::min(left, most));
                EXPECT_EQ(band.chunk, std::min(mask.chunk, most));
              }
            }
          }
          EXPECT_EQ(headers.size(), 1u) << "mask " << mask.left << " " << mask.right << " d " << d;
        }
      }
    }
  }
}

TEST(Sm90Model, IsSane) {
  const auto cycles = [](const test::ForwardShape& shape) {
    const Problem p = forward_problem(shape);
    const ForwardPlan plan = plan_of(p);
    const BlockCost cost = block_cost(plan, p);
    return predicted_cycles(cost, kernels::blocks_of(plan.work), plan.work.first_split,
                            plan.work.splits, 132);
  };
  const double full_16k = cycles({.batch = 1, .sq = 16384, .sk = 16384, .hq = 16, .hk = 16});
  const double causal_16k =
      cycles({.batch = 1, .sq = 16384, .sk = 16384, .hq = 16, .hk = 16, .mask = causal()});
  EXPECT_GT(causal_16k, 0.48 * full_16k);
  EXPECT_LT(causal_16k, 0.60 * full_16k);
  EXPECT_NEAR(cycles({.batch = 2, .sq = 16384, .sk = 16384, .hq = 16, .hk = 16}) / full_16k, 2,
              0.1);
  // Never faster than the tensor cores: 4096 flops a cycle on 132 SMs.
  EXPECT_GT(full_16k, 4.0 * 16 * 16384 * 16384 * 128 / 4096 / 132);
  EXPECT_LT(full_16k, 1.2 * 4.0 * 16 * 16384 * 16384 * 128 / 4096 / 132);
  // Too few tiles for the machine take as long as one.
  EXPECT_NEAR(predicted_cycles({100, 100, 100}, 10, 10, 1, 132), 100, 1e-9);
  EXPECT_NEAR(predicted_cycles({100, 100, 100}, 133, 133, 1, 132), 200, 1e-9);
  // Unequal blocks take as long as the longest one, or as all of them take on average and half of
  // the shortest.
  EXPECT_NEAR(predicted_cycles({50, 90, 10}, 133, 133, 1, 132), 90, 1e-9);
  EXPECT_NEAR(predicted_cycles({50, 90, 10}, 264, 264, 1, 132), 105, 1e-9);
}

// SMs that take each q tile when the one before it ends.
TEST(Sm90Model, PredictsItemsTakenOneByOne) {
  for (const int64_t d : {64, 128, 256}) {
    for (const int64_t s : {1024, 4096, 8192, 16384}) {
      for (const int64_t heads : {4, 16, 64, 500}) {
        const Problem p = forward_problem(
            {.batch = 1, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = causal()});
        ForwardPlan plan = plan_of(p);
        if (plan.split_tail) continue;
        const BlockCost cost = block_cost(plan, p);
        std::multiset<double> ends;
        for (int i = 0; i < 132; ++i) ends.insert(0);
        for (int number = 0; number < plan.work.q_tiles; ++number) {
          const kernels::QTile tile = kernels::q_tile_of(plan.work, static_cast<int>(heads), false,
                                                         band_of(plan, p.mask), number);
          const int keys = cost.key_tiles[plan.work.row_blocks - 1 - tile.block];
          const double begin = *ends.begin();
          ends.erase(ends.begin());
          ends.insert(begin + cost.end + keys * cost.key_tile);
        }
        const double predicted =
            predicted_cycles(cost, kernels::blocks_of(plan.work), plan.work.first_split, 1, 132);
        EXPECT_NEAR(predicted / *ends.rbegin(), 1, 0.11) << d << " " << s << " " << heads;
      }
    }
  }
}

// 1024 rows are 16 strips of 64: with three warpgroups 2, 2, 3, 3, 3 and 3 a block.
TEST(Sm90Model, ShortBlocksComeFirst) {
  const auto cost = [](int64_t sk, const Mask& mask) {
    const Problem p = forward_problem({.sq = 1024, .sk = sk, .hq = 2, .hk = 2, .mask = mask});
    ForwardPlan plan = plan_of(p);
    plan.consumers = 3;
    plan.block_keys = 64;
    plan.work.row_blocks = 6;
    return block_cost(plan, p);
  };
  const double key_tile = (cost(1024, full()).mean - cost(512, full()).mean) / 8;
  const BlockCost causal_cost = cost(1024, causal());
  const double mean_tiles = (2 + 4 + 7 + 10 + 13 + 16) / 6.0;
  EXPECT_NEAR((causal_cost.longest - causal_cost.mean) / key_tile, 16 - mean_tiles, 1e-6);
}

// All heads at once under a band only where enough SMs share each.
TEST(Sm90Plan, HeadsInOneSection) {
  const auto bulk = [](int64_t s, int64_t hk, const Mask& mask) {
    return plan_of(forward_problem({.batch = 16384 / s,
                                    .sq = s,
                                    .sk = s,
                                    .hq = 8,
                                    .hk = hk,
                                    .d = 256,
                                    .mask = mask}))
        .work.bulk_heads;
  };
  EXPECT_EQ(bulk(16384, 8, causal()), 0);
  EXPECT_EQ(bulk(8192, 8, causal()), 0);
  EXPECT_GT(bulk(4096, 8, causal()), 0);
  EXPECT_EQ(bulk(4096, 4, causal()), 0);  // query heads share, too
  EXPECT_GT(bulk(16384, 8, full()), 0);
}

// Few queries with many keys: blocks are alike under a causal mask, too, and the last ones are cut.
TEST(Sm90Plan, AlikeBlocksUnderABandAreCut) {
  const auto plan = [](int64_t sq, int64_t hk) {
    return plan_of(
        forward_problem({.batch = 1, .sq = sq, .sk = 16384, .hq = 16, .hk = hk, .mask = causal()}));
  };
  const ForwardPlan few = plan(2048, 16);
  EXPECT_TRUE(few.split_tail);
  EXPECT_EQ(few.work.first_split, 132);
  EXPECT_EQ(few.work.end_split, kernels::blocks_of(few.work));
  EXPECT_FALSE(plan(16384, 16).split_tail);
}

// Strips of all heads of a group fill blocks, but where each head has its own bias.
TEST(Sm90Plan, HeadsOfAGroupShareBlocks) {
  const auto plan = [](int64_t hk, std::optional<DType> bias = {}) {
    return plan_of(forward_problem(
        {.batch = 8, .sq = 64, .sk = 8192, .hq = 64, .hk = hk, .mask = causal(), .bias = bias}));
  };
  const ForwardPlan few = plan(8);
  EXPECT_TRUE(few.shares_blocks);
  EXPECT_EQ(kernels::blocks_of(few.work), 8 * 8 * ((8 + few.consumers - 1) / few.consumers));
  EXPECT_FALSE(plan(64).shares_blocks);
  EXPECT_FALSE(plan(8, DType::kBF16).shares_blocks);
  EXPECT_FALSE(plan_of(forward_problem({.sq = 16384, .sk = 16384, .d = 256})).shares_blocks);
}

TEST(Sm90Rejects, NamesWhatAndWhatInstead) {
  const auto why = [](const test::ForwardShape& shape) {
    return forward_rejects(forward_problem(shape));
  };
  EXPECT_EQ(why({}), "");
  EXPECT_EQ(why({.dtype = DType::kF32}), "computes bf16 and f16");
  EXPECT_EQ(why({.dtype = DType::kE4M3}), "");
  EXPECT_EQ(why({.dtype = DType::kE4M3, .sq = 1, .invariant = true}), "");
  EXPECT_EQ(why({.d = 264}), "computes d and dv up to 256, got 264 and 264");
  for (int64_t d = 1; d <= 256; d += d < 32 ? 1 : 15) {
    EXPECT_EQ(why({.d = d}), "");
    EXPECT_EQ(why({.dv = d, .packed = true}), "");
  }
}

// Products of e4m3 leave the softmax to bind: tiles of many keys, of whole steps of 32.
TEST(Plan, FastCodesTakeTilesOfManyKeys) {
  for (const auto& [d, consumers, block_keys] :
       {std::tuple{64, 3, 128}, {128, 3, 96}, {192, 2, 96}, {256, 2, 96}}) {
    const Problem p = forward_problem({.dtype = DType::kE4M3,
                                       .batch = 1,
                                       .sq = 16384,
                                       .sk = 16384,
                                       .hq = 16,
                                       .hk = 16,
                                       .d = d,
                                       .mask = causal(),
                                       .fast_codes = true});
    const ForwardPlan plan = choose(p).plan;
    EXPECT_TRUE(plan.centers_v());
    EXPECT_EQ(plan.consumers, consumers) << d;
    EXPECT_EQ(plan.block_keys, block_keys) << d;
    // Room for V, a mean for each 1536 keys and column, and the sums of rows.
    const int64_t keys = (p.sk + block_keys - 1) / block_keys * block_keys;
    EXPECT_GE(workspace_of(p, plan).end, 16 * (keys * d + 11 * d * 4) + plan.grid * 64 * 11 * 8);
  }
}

TEST(Sm90Rejects, Caches) {
  const auto why = [](auto change) {
    Problem p = forward_problem({});
    change(p);
    return forward_rejects(p);
  };
  for (const auto pages : {Problem::Cache::Pages::kTable, Problem::Cache::Pages::kLists}) {
    const auto paged = [&](int64_t page, bool invariant) {
      return why([&](Problem& p) {
        p.cache.pages = pages;
        p.cache.page = page;
        p.cache.entries = 100;
        p.cache.ids = 50;
        p.invariant = invariant;
      });
    };
    EXPECT_EQ(paged(8, false), "");
    EXPECT_EQ(paged(256, false), "");
    EXPECT_EQ(paged(1, false), "computes pages of multiples of 8 keys, got 1");
    EXPECT_EQ(paged(17, false), "computes pages of multiples of 8 keys, got 17");
    EXPECT_EQ(paged(16, true), "computes pages without `invariant`");
    EXPECT_EQ(paged(1 << 26, false),
              "computes up to 2^31 keys in lists of pages, got 50 pages of 67108864");
    const auto chunks = [&](int64_t d) {
      Problem p = forward_problem({.d = d, .mask = chunked(300, causal())});
      p.cache.pages = pages;
      p.cache.page = 16;
      p.cache.entries = 100;
      p.cache.ids = 50;
      return forward_rejects(p);
    };
    EXPECT_EQ(chunks(192), "");
    EXPECT_EQ(chunks(200), "computes chunks over pages with d and dv up to 192, got 200 and 200");
  }
  EXPECT_EQ(why([](Problem& p) { p.given.set(Arg::kCacheBatchIdx, true); }),
            "computes sequence b from row b of k: not with a cache_batch_idx");
  EXPECT_EQ(why([](Problem& p) { p.given.set(Arg::kLeftpadK, true); }),
            "computes keys from the first on: not with a leftpad_k");
  EXPECT_EQ(why([](Problem& p) { p.packed = true; }),
            "computes packed queries with packed keys or pages alone");
}

// Boxes of a key tile lie inside one page each, and begin where the swizzle does.
TEST(Sm90ForwardTiles, BoxesOfPages) {
  for (const int64_t d : {32, 64, 128, 192, 256}) {
    for (const int64_t page : {8, 16, 24, 48, 64, 80, 256}) {
      Problem p = forward_problem({.d = d, .mask = causal()});
      p.cache.pages = Problem::Cache::Pages::kTable;
      p.cache.page = page;
      p.cache.entries = p.cache.ids = 1000;
      std::vector<std::string> rejected;
      const auto tiles = forward_candidates(p, {}, &rejected);
      ASSERT_FALSE(tiles.empty()) << d;
      for (const Fitting<ForwardPlan>& tile : tiles) {
        const int box = tile.plan.box_keys;
        EXPECT_EQ(page % box, 0);
        EXPECT_EQ(tile.plan.block_keys % box, 0);
        EXPECT_EQ(box % 8, 0);
        EXPECT_LE(tile.plan.block_keys / box, 32);  // a lane each
      }
    }
  }
}

// Sinks change a constant of kernel_config.h, and nothing else of a plan.
TEST(ForwardPlan, SinksAreAConstant) {
  std::vector<std::string> rejected;
  const auto plans = [&](bool sinks) {
    return forward_candidates(forward_problem({.mask = causal(), .sinks = sinks}), {}, &rejected);
  };
  const auto without = plans(false), with = plans(true);
  ASSERT_EQ(with.size(), without.size());
  for (size_t i = 0; i < with.size(); ++i) {
    ForwardPlan plan = with[i].plan;
    EXPECT_NE(kernel_config(plan).find("kHasSinks = 1,"), std::string::npos);
    EXPECT_NE(kernel_config(without[i].plan).find("kHasSinks = 0,"), std::string::npos);
    plan.has_sinks = false;
    EXPECT_EQ(plan, without[i].plan);
  }
}

TEST(Sm90Rejects, TreeMasks) {
  Problem p = forward_problem({});
  p.given.set(Arg::kTreeMask, true);
  EXPECT_EQ(forward_rejects(p), "computes without tree masks");
}

// The kernel counts rows and diagonals with ints.
TEST(Sm90Rejects, SequencesThatIntsCannotCount) {
  const int64_t most = (int64_t{1} << 29) - 1;
  const auto why = [](int64_t sq, int64_t sk, bool packed) {
    return forward_rejects(
        forward_problem({.batch = 1, .sq = sq, .sk = sk, .hq = 1, .hk = 1, .packed = packed}));
  };
  for (const bool packed : {false, true}) {
    EXPECT_EQ(why(most, most, packed), "");
    EXPECT_EQ(why(most + 1, 5, packed),
              "computes sequences of less than 2^29 rows, got 536870912 of q and 5 of k");
    EXPECT_EQ(why(5, most + 1, packed),
              "computes sequences of less than 2^29 rows, got 5 of q and 536870912 of k");
  }
  // At the limits every sum of the walk fits: the last strip's rows after the end included.
  const Mask widest = window(int64_t{1} << 60, int64_t{1} << 60);
  const Problem p = forward_problem(
      {.batch = 1, .sq = most, .sk = most, .hq = 1, .hk = 1, .mask = widest, .invariant = true});
  const kernels::Band band = band_of(plan_of(p), p.mask);
  const int64_t diagonal = most + 64 + 64;
  EXPECT_LE(diagonal + band.right + 1, std::numeric_limits<int>::max());
  EXPECT_GE(-most - band.left, std::numeric_limits<int>::min());
  EXPECT_GE(band.left, diagonal);  // and they bound nothing
  EXPECT_GE(band.right, most + 128);
  const Problem chunks = forward_problem({.batch = 1,
                                          .sq = most,
                                          .sk = most,
                                          .hq = 1,
                                          .hk = 1,
                                          .mask = chunked(int64_t{1} << 60),
                                          .invariant = true});
  const kernels::Band chunk = band_of(plan_of(chunks), chunks.mask);
  EXPECT_LE(most + 128 + chunk.chunk, std::numeric_limits<int>::max());
  EXPECT_GE(-most - chunk.chunk, std::numeric_limits<int>::min());
  EXPECT_GE(chunk.chunk, most + 128);
}

// 0 times the -inf of a hidden key is NaN: scores whose scale rounds to nothing are multiplied
// before they are hidden.
TEST(Sm90Plan, ScalesThatRoundToNothingAreNotFolded) {
  for (const double scale : {1.0, 1e-30, 1e-37}) {
    EXPECT_FALSE(plan_of(forward_problem({.scale = scale})).transforms_scores) << scale;
  }
  for (const double scale : {0.0, 1e-39, 1e-45, 1e-60, 1e-320, -1e-60}) {
    EXPECT_TRUE(plan_of(forward_problem({.scale = scale})).transforms_scores) << scale;
  }
}

// What TMA cannot address is copied or stored otherwise, and said.
TEST(Sm90Plan, OddRowsAreCopied) {
  using Store = ForwardPlan::Store;
  const auto copies = [](const ForwardPlan& plan) {
    return std::array{!plan.copies_q.empty(), !plan.copies_k.empty(), !plan.copies_v.empty()};
  };
  const ForwardPlan even = plan_of(forward_problem({.d = 72}));
  EXPECT_FALSE(even.copies());
  EXPECT_EQ(even.store, Store::kTiles);
  EXPECT_EQ(plan_of(forward_problem({.d = 256})).store, Store::kRows);
  const ForwardPlan odd = plan_of(forward_problem({.d = 17, .dv = 64}));
  EXPECT_EQ(copies(odd), (std::array{true, true, false}));
  EXPECT_EQ(odd.store, Store::kTiles);
  const ForwardPlan odd_v = plan_of(forward_problem({.dv = 20}));
  EXPECT_EQ(copies(odd_v), (std::array{false, false, true}));
  EXPECT_EQ(odd_v.store, Store::kElements);
  const Details details = describe(odd_v).details;
  EXPECT_TRUE(details.has("copies.v")) << details.json();
  EXPECT_FALSE(details.has("copies.k")) << details.json();
  EXPECT_TRUE(details.get<bool>("stores_elements")) << details.json();
  const ForwardPlan shifted = plan_of(forward_problem({.base = 0x7f0000000008}));
  EXPECT_EQ(copies(shifted), (std::array{true, true, true}));
  EXPECT_EQ(shifted.store, Store::kElements);
  // A box of one row, head and sequence has no strides.
  EXPECT_FALSE(
      plan_of(forward_problem({.batch = 1, .sq = 1, .sk = 1, .hq = 1, .hk = 1, .d = 17})).copies());
}

// With no rows of q: their products with anything are not numbers of 64 bits.
TEST(AnyPlan, AnyNumberOfHeads) {
  Problem p;
  p.dtypes = OperandTypes::all(DType::kBF16);
  p.packed = p.packed_k = true;
  p.batch = 1 << 20;
  p.hq = p.hk = int64_t{1} << 44;
  p.sk = p.total_k = p.total_keys = 64;
  p.d = p.dv = 64;
  EXPECT_NE(decode_rejects_few(p).find("up to 2^31 tiles"), std::string::npos);
  p.hk = 1;
  EXPECT_NE(forward_rejects(p).find("18446744073709551616 heads"), std::string::npos);
  p.pass = Pass::kBackward;
  EXPECT_NE(backward_rejects(p).find("18446744073709551616 heads"), std::string::npos);
}

}  // namespace
}  // namespace fulgur::cuda
