// What the portable kernels compute, and which tile each card takes.
#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "backward_call.h"
#include "cuda/decode/candidates.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/cards.h"
#include "cuda/engine/choose.h"
#include "cuda/portable/backward.h"
#include "cuda/portable/forward.h"
#include "cuda/portable/wide_backward.h"
#include "forward_call.h"

namespace fulgur::cuda::portable {
namespace {

using test::backward_problem;
using test::forward_problem;

constexpr Target kTarget{80, Target::Form::kCubin};

/// The tile that a card takes.
TileId tile_of(const Problem& problem, const Card& card) {
  Reasons reasons;
  return ranked(problem, architecture_of(kTarget).families, card, {}, &reasons).at(0)->tile;
}

/// What decides which tiles there are: d, whether there is a bias, the dtype.
const std::vector<std::tuple<int64_t, bool, DType>> kOfTiles = [] {
  std::vector<std::tuple<int64_t, bool, DType>> all;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int64_t d : {1, 16, 64, 65, 96, 128, 129, 192, 193, 224, 256}) {
      for (const bool bias : {false, true}) all.emplace_back(d, bias, dtype);
    }
  }
  return all;
}();

TEST(PortablePlan, EveryCardHasTilesThatFit) {
  for (const Card& card : known_cards()) {
    const int reserved = features_of(card.target).reserved_bytes;
    for (const auto& [d, bias, dtype] : kOfTiles) {
      std::vector<std::string> rejected;
      Problem p = forward_problem({.dtype = dtype, .d = d, .mask = causal()});
      p.given.set(Arg::kBias, bias);
      const auto tiles = forward_candidates(p, card, &rejected);
      const bool too_large = dtype == DType::kF32 && d > 160 && card.capability < 80;
      EXPECT_EQ(tiles.empty(), too_large) << card.name << " d " << d;
      std::set<std::string> names;  // tuning knows tiles by them
      for (const auto& [plan, cycles, tuned_only] : tiles) {
        EXPECT_LE(plan.shared_bytes, card.shared_bytes);
        EXPECT_LE(plan.residents * (plan.shared_bytes + reserved), card.sm_shared_bytes);
        EXPECT_EQ(plan.work.q_tiles, kernels::blocks_of(plan.work));
        EXPECT_GT(cycles, 0);
        EXPECT_TRUE(names.insert(plan.tile().text()).second);
      }
    }
  }
}

// Hopper's own kernels take 16 bits.
TEST(PortablePlan, F32OnHopper) {
  for (const Problem& p :
       {forward_problem({.dtype = DType::kF32}), backward_problem({.dtype = DType::kF32})}) {
    Reasons reasons;
    Card card;
    card.target = {90, Target::Form::kSpecific};
    const auto families = architecture_of(card.target).families;
    const TileId tile = ranked(p, families, card, {}, &reasons).at(0)->tile;
    EXPECT_TRUE(tile.family.starts_with("portable_")) << tile.family;
  }
}

// One warp of a scheduler waits for the operands of its products, which another one hides.
TEST(PortablePlan, SchedulersHaveTwoWarpsOfF32WhereTheyFit) {
  const auto warps = [](const ForwardPlan& plan) { return plan.threads() / 32 * plan.residents; };
  for (const Card& card : known_cards()) {
    for (const int64_t d : {64, 128, 192, 256}) {
      std::vector<std::string> rejected;
      const auto tiles = forward_candidates(
          forward_problem(
              {.dtype = DType::kF32, .batch = 4, .sq = 4096, .sk = 4096, .hq = 8, .d = d}),
          card, &rejected);
      if (tiles.empty()) continue;
      const auto most =
          std::ranges::max_element(tiles, {}, [&](const auto& tile) { return warps(tile.plan); });
      const auto best = std::ranges::min_element(tiles, {}, &Fitting<ForwardPlan>::cycles);
      EXPECT_GE(warps(best->plan), std::min(warps(most->plan), 8)) << card.name << " d " << d;
    }
  }
}

// With 16 rows a warp, loads from shared memory take as long as fast tensor cores.
TEST(PortablePlan, WarpsHave32RowsWhereTensorCoresAreFast) {
  for (const int64_t d : {64, 128}) {
    const Problem p = forward_problem({.batch = 4, .sq = 4096, .sk = 4096, .hq = 16, .d = d});
    EXPECT_EQ(tile_of(p, card_called("a100")).family, "portable_wide") << d;
    EXPECT_EQ(tile_of(p, card_called("h200")).family, "portable_wide") << d;
    EXPECT_EQ(tile_of(p, card_called("4090")).family, "portable_forward") << d;
    EXPECT_EQ(tile_of(p, card_called("5090")).family, "portable_forward") << d;
  }
}

// 64 and 48 keys leave no registers for more than plain scores, and from 10.0 on none at all. An SM
// has two CTAs of a wide tile, or none is taken.
TEST(PortablePlan, WideTilesHave32KeysWhereRegistersAreFew) {
  const auto keys = [](const test::ForwardShape& shape, const char* card_name, int capability) {
    Card card = card_called(card_name);
    card.target = {capability, Target::Form::kCubin};
    std::vector<std::string> rejected;
    const auto tiles = forward_candidates(forward_problem(shape), card, &rejected);
    const auto first =
        std::ranges::find_if(tiles, [](const auto& t) { return t.tuned_only.empty(); });
    return first->plan.block_keys;
  };
  EXPECT_EQ(keys({.d = 128}, "h200", 90), 64);
  EXPECT_EQ(keys({.d = 128}, "a100", 80), 48);
  EXPECT_EQ(keys({.d = 128, .mask = causal()}, "a100", 80), 48);
  EXPECT_EQ(keys({.d = 128, .mask = window(128, 0)}, "a100", 80), 32);
  EXPECT_EQ(keys({.d = 128, .mask = chunked(64)}, "a100", 80), 32);
  EXPECT_EQ(keys({.d = 128, .softcap = 9}, "a100", 80), 32);
  EXPECT_EQ(keys({.d = 128, .dropout = 0.1}, "a100", 80), 32);
  EXPECT_EQ(keys({.d = 128}, "b200", 100), 32);
}

// With a bias and dropout a third CTA of an SM would have too few registers.
TEST(PortablePlan, ABiasWithDropoutTakesTheRegistersOfAThirdCta) {
  const auto residents = [](bool bias, double dropout) {
    Problem p = forward_problem({.d = 64, .dropout = dropout});
    p.given.set(Arg::kBias, bias);
    std::vector<std::string> rejected;
    return forward_candidates(p, card_called("a100"), &rejected).back().plan.residents;
  };
  EXPECT_EQ(residents(false, 0.1), 3);
  EXPECT_EQ(residents(true, 0), 3);
  EXPECT_EQ(residents(true, 0.1), 2);
}

TEST(PortablePlan, AFasterCardIsPredictedToTakeFewerCycles) {
  const Problem p = forward_problem({.batch = 4, .sq = 4096, .sk = 4096, .hq = 16, .d = 128});
  Card slow = card_called("4090"), fast = slow;
  fast.mma_rate *= 2;
  const auto cycles = [&](const Card& card) {
    std::vector<std::string> rejected;
    return forward_candidates(p, card, &rejected).at(0).cycles;
  };
  EXPECT_LT(cycles(fast), cycles(slow));
}

TEST(PortableBackwardPlan, EveryCardHasTilesThatFit) {
  for (const Card& card : known_cards()) {
    for (const auto& [d, bias, dtype] : kOfTiles) {
      std::vector<std::string> rejected;
      Problem p =
          backward_problem({.dtype = dtype, .sq = 700, .sk = 900, .d = d, .mask = causal()});
      p.given.set(Arg::kBias, bias);
      const auto tiles = backward_candidates(p, card, &rejected);
      const int64_t max_of_f32 = card.capability < 80              ? 128
                                 : card.shared_bytes < (100 << 10) ? 224
                                                                   : 256;
      const bool too_large = dtype == DType::kF32 && d > max_of_f32;
      EXPECT_EQ(tiles.empty(), too_large) << card.name << " d " << d;
      std::set<std::string> names;  // tuning knows tiles by them
      for (const auto& [plan, cycles, tuned_only] : tiles) {
        EXPECT_LE(plan.shared_bytes, card.shared_bytes);
        EXPECT_GE(plan.key_blocks.blocks * plan.block_keys, 900);
        EXPECT_EQ(plan.key_blocks.batch_heads, p.batch * p.hk * plan.splits);
        EXPECT_EQ(plan.splits * plan.split_heads, p.group());
        EXPECT_EQ(plan.dq_by_fours, card.capability >= 90);
        EXPECT_GT(cycles, 0);
        EXPECT_TRUE(names.insert(plan.tile().text()).second);
      }
    }
  }
}

// A step takes fewer barriers where more of Q and dO fits.
TEST(PortableBackwardPlan, StagesFillSharedMemory) {
  const auto stages = [](const char* card, int64_t d) {
    std::vector<std::string> rejected;
    const Problem p = backward_problem({.batch = 4, .sq = 4096, .sk = 4096, .hq = 16, .d = d});
    return backward_candidates(p, card_called(card), &rejected).at(0).plan.stages;
  };
  EXPECT_EQ(stages("h200", 128), 3);
  EXPECT_EQ(stages("a100", 128), 2);
  EXPECT_EQ(stages("4090", 64), 2);
  EXPECT_EQ(stages("4090", 256), 1);
}

TEST(PortableBackwardPlan, OrdersAdditionsWhereBitsAreWanted) {
  const auto method = [](bool deterministic, bool invariant) {
    Problem p = backward_problem({.d = 64, .invariant = invariant});
    p.deterministic = deterministic;
    std::vector<std::string> rejected;
    return backward_candidates(p, card_called("a100"), &rejected).at(0).plan.dq_method;
  };
  EXPECT_EQ(method(false, false), DqMethod::kAtomic);
  EXPECT_EQ(method(true, false), DqMethod::kOrdered);
  EXPECT_EQ(method(false, true), DqMethod::kOrdered);
}

// Where the last blocks of a head are short, they come first, unless the long ones would then leave
// SMs idle at the end. The order of an invariant call does not depend on the batch.
TEST(PortableBackwardPlan, BlocksThatAddInOrderMayDescend) {
  const auto order = [](const test::ForwardShape& shape, bool deterministic = true) {
    const Problem p = backward_problem(shape, {.deterministic = deterministic});
    std::vector<std::string> rejected;
    return backward_candidates(p, card_called("h200"), &rejected).at(0).plan.key_blocks.order;
  };
  const test::ForwardShape many{
      .batch = 16, .sq = 1024, .sk = 1024, .hq = 8, .hk = 8, .d = 256, .dv = 256, .mask = causal()};
  test::ForwardShape narrow = many, unmasked = many, few = many, invariant = many, longer = many;
  narrow.d = 128;
  narrow.dv = 128;
  unmasked.mask = full();
  few.batch = 1;
  invariant.invariant = true;
  longer.sq = longer.sk = 4096;
  EXPECT_EQ(order(many), kernels::kDescending);
  EXPECT_EQ(order(many, /*deterministic=*/false), kernels::kAscending);
  for (const test::ForwardShape& shape : {narrow, unmasked, few, invariant, longer})
    EXPECT_EQ(order(shape), kernels::kAscending);
}

TEST(PortableBackwardPlan, TheTileOfAnInvariantCallDoesNotDependOnTheBatch) {
  std::set<std::string> tiles;
  for (const int64_t batch : {1, 3, 200}) {
    for (const int64_t sq : {1, 77, 5000}) {
      const Problem p = backward_problem(
          {.batch = batch, .sq = sq, .sk = 5000, .d = 64, .mask = causal(), .invariant = true});
      tiles.insert(tile_of(p, card_called("a100")).text());
    }
  }
  EXPECT_EQ(tiles.size(), 1u);
}

// Few kv heads and keys are too few CTAs for a card: several share the q heads of a group then,
// where the workspace has room for their partial dK and dV.
TEST(PortableBackwardPlan, SharesQHeadsWhereThereAreFewKeyBlocks) {
  const auto splits = [](test::ForwardShape shape, bool deterministic = false) {
    const Problem p = backward_problem(shape, {.deterministic = deterministic});
    std::vector<std::string> rejected;
    const BackwardPlan plan = backward_candidates(p, card_called("h200"), &rejected).at(0).plan;
    EXPECT_EQ(plan.reduces(), plan.splits_heads);
    EXPECT_EQ(workspace_of(p, plan).partial_dv > workspace_of(p, plan).partial_dk, plan.reduces());
    return plan.splits;
  };
  const test::ForwardShape few{.batch = 1, .sq = 4096, .sk = 4096, .hq = 32, .hk = 1};
  test::ForwardShape many = few, invariant = few, tight = few, heads = few;
  many.batch = 32;
  invariant.invariant = true;
  tight.max_workspace = 1;
  heads.hk = 32;
  EXPECT_GE(splits(few), 4);
  EXPECT_GE(splits(few, /*deterministic=*/true), 4);
  EXPECT_EQ(splits(many), 1);
  EXPECT_EQ(splits(invariant), 1);
  EXPECT_EQ(splits(tight), 1);
  EXPECT_EQ(splits(heads), 1);
}

// Heads wider than those of other kernels, d or dv above 256.
const std::vector<std::pair<int64_t, int64_t>> kWideHeads = {{257, 257}, {320, 320}, {512, 512},
                                                             {576, 512}, {16, 300},  {512, 64}};

TEST(PortableWideBackwardPlan, EveryCardHasTilesThatFit) {
  for (const Card& card : known_cards()) {
    for (const auto& [d, dv] : kWideHeads) {
      for (const bool bias : {false, true}) {
        Problem p = backward_problem({.sq = 700, .sk = 900, .d = d, .dv = dv, .mask = causal()});
        p.given.set(Arg::kBias, bias);
        std::vector<std::string> rejected;
        const auto tiles = wide_backward_candidates(p, card, &rejected);
        // 64 KB, of compute capability 7.5, have room for 32 rows of nine panels.
        const bool fits = card.shared_bytes > 65536 || ceil_div(d, 64) + ceil_div(dv, 64) <= 9;
        EXPECT_EQ(!tiles.empty(), fits) << card.name << " d " << d;
        std::set<std::string> names;  // tuning knows tiles by them
        for (const auto& [plan, cycles, tuned_only] : tiles) {
          for (const WideGradient of : plan.gradients()) {
            EXPECT_LE(plan.key_of(of).layout().bytes, card.shared_bytes);
            EXPECT_GE(plan.key_of(of).stages, 2);
          }
          EXPECT_GE(plan.key_blocks.blocks * plan.block_keys, 900);
          EXPECT_GE(plan.row_blocks.blocks * plan.block_keys, 700);
          EXPECT_EQ(plan.row_blocks.batch_heads, p.batch * p.hq);
          EXPECT_EQ(plan.key_blocks.batch_heads, p.batch * p.hk * plan.splits);
          EXPECT_EQ(plan.splits * plan.split_heads, p.group());
          EXPECT_GT(cycles, 0);
          EXPECT_TRUE(names.insert(plan.tile().text()).second);
        }
      }
    }
  }
}

TEST(PortableWideBackwardPlan, ComputesWhatIsWanted) {
  const auto gradients = [](bool dq, bool dk_dv) {
    Problem p = backward_problem({.d = 512});
    p.given.set(Arg::kDq, dq);
    p.given.set(Arg::kDk, dk_dv);
    p.given.set(Arg::kDv, dk_dv);
    std::vector<std::string> rejected;
    return wide_backward_candidates(p, card_called("h200"), &rejected).at(0).plan.gradients();
  };
  using enum WideGradient;
  EXPECT_EQ(gradients(true, true), (std::vector{kOfQ, kOfK, kOfV}));
  EXPECT_EQ(gradients(true, false), std::vector{kOfQ});
  EXPECT_EQ(gradients(false, true), (std::vector{kOfK, kOfV}));
}

TEST(PortableWideBackwardPlan, SharesQHeadsWhereThereAreFewKeyBlocks) {
  const auto splits = [](test::ForwardShape shape) {
    shape.d = 576;
    shape.dv = 512;
    const Problem p = backward_problem(shape);
    std::vector<std::string> rejected;
    return wide_backward_candidates(p, card_called("h200"), &rejected).at(0).plan.splits;
  };
  const test::ForwardShape few{.batch = 1, .sq = 2048, .sk = 2048, .hq = 32, .hk = 1};
  test::ForwardShape many = few, invariant = few;
  many.batch = 32;
  invariant.invariant = true;
  EXPECT_GE(splits(few), 4);
  EXPECT_EQ(splits(many), 1);
  EXPECT_EQ(splits(invariant), 1);
}

TEST(PortableWideBackwardPlan, IsTheChoiceForWideHeads) {
  for (const auto& [d, dv] : kWideHeads) {
    const Problem p = backward_problem({.d = d, .dv = dv});
    EXPECT_EQ(tile_of(p, card_called("a100")).family, "portable_backward_wide");
    EXPECT_EQ(wide_backward_rejects(p), "");
  }
  EXPECT_EQ(wide_backward_rejects(backward_problem({.dtype = DType::kF32, .d = 512})),
            "computes bf16 and f16");
}

// The bits of a sequence depend on its tile.
TEST(PortablePlan, TheTileOfAnInvariantCallDoesNotDependOnTheBatch) {
  std::set<std::string> tiles;
  for (const int64_t batch : {1, 3, 200}) {
    for (const int64_t sq : {1, 77, 5000}) {
      const Problem p = forward_problem(
          {.batch = batch, .sq = sq, .sk = 5000, .d = 64, .mask = causal(), .invariant = true});
      tiles.insert(tile_of(p, card_called("a100")).text());
    }
  }
  EXPECT_EQ(tiles.size(), 1u);
}

// A step of decoding takes the decode kernels' warp path on every card, with splits where CTAs
// would have nothing to do, and long blocks of rows the forward kernel.
TEST(PortablePlan, FewRowsAreDecoded) {
  for (const Card& card : known_cards()) {
    if (features_of(card.target).has_wgmma) continue;
    const int reserved = features_of(card.target).reserved_bytes;
    for (const int64_t group : {1, 8, 32}) {
      for (const int64_t batch : {1, 64}) {
        const Problem p = forward_problem(
            {.batch = batch, .sq = 1, .sk = 8192, .hq = 8 * group, .hk = 8, .d = 128});
        EXPECT_EQ(tile_of(p, card).family, "portable_decode") << card.name << " group " << group;
        const decode::DecodePlan plan = decode::decode_candidate(p, card).plan;
        EXPECT_LE(plan.shared_bytes, card.shared_bytes);
        EXPECT_LE(plan.residents * (plan.shared_bytes + reserved), card.sm_shared_bytes + reserved);
        EXPECT_FALSE(plan.warpgroup_path());
        EXPECT_GE(plan.grid, card.sms);
      }
    }
    const Problem rows = forward_problem({.batch = 4, .sq = 4096, .sk = 4096, .hq = 16, .d = 128});
    EXPECT_NE(tile_of(rows, card).family, "portable_decode") << card.name;
  }
}

TEST(PortablePlan, InvariantCallsAreNotSplit) {
  const Problem p = forward_problem({.sq = 1, .sk = 8192, .d = 128, .invariant = true});
  EXPECT_NE(tile_of(p, card_called("a100")).family, "portable_decode");
}

TEST(PortablePlan, SaysWhatItDoesNotCompute) {
  EXPECT_EQ(forward_rejects(forward_problem({})), "");
  EXPECT_EQ(forward_rejects(forward_problem({.dtype = DType::kF32})), "");
  Problem f64 = forward_problem({});
  f64.dtypes = OperandTypes::all(DType::kF64);
  EXPECT_EQ(forward_rejects(f64), "computes bf16, f16 and f32");
  Problem over_codes = forward_problem({.dtype = DType::kF32});
  over_codes.dtypes.k = DType::kInt8;
  EXPECT_EQ(forward_rejects(over_codes), "multiplies f32 with f32 alone");
  EXPECT_EQ(forward_rejects(forward_problem({.d = 320})),
            "computes d and dv up to 256, got 320 and 320");
  EXPECT_EQ(backward_rejects(backward_problem({})), "");
  EXPECT_EQ(backward_rejects(backward_problem({.dtype = DType::kF32})), "");
  f64.pass = Pass::kBackward;
  EXPECT_EQ(backward_rejects(f64), "computes bf16, f16 and f32");
  EXPECT_EQ(backward_rejects(backward_problem({.d = 320})),
            "computes d and dv up to 256, got 320 and 320");
}

}  // namespace
}  // namespace fulgur::cuda::portable
