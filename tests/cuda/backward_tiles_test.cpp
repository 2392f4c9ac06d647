// The backward pass of the case list by every tile: dQ as sums and dQ from stored dS, of which the
// cost model takes one, by the shape.
#include "cuda/hopper_backward_plan.h"
#include "every_tile.h"

namespace fulgur::test {
namespace {

class BackwardTiles : public OnGpu, public testing::WithParamInterface<Case> {};
class BackwardParts : public OnGpu {};

// Those that more than one tile computes.
std::vector<Case> chosen(std::vector<Case> cases) {
  std::erase_if(cases, [](const Case& c) {
    const bool computed = c.dtype == DType::kBF16 || c.dtype == DType::kF16;
    return !computed || c.tree != Tree::kNone || c.d > 128 || c.dv > 128;
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

// Heads of k and v whole, as where there are enough blocks of keys for the multiprocessors that are
// planned for, and in parts of their q heads and rows, as where there are not.
TEST_F(BackwardParts, HeadsWholeAndInParts) {
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
  for (const int multiprocessors : {2, 132}) {
    for (const Case& c : cases) {
      Workload w(c, c.seed());
      w.options.engine = "cuda";
      run_backward_tiles(w, expect(w), multiprocessors);
      std::vector<std::string> rejected;
      for (const auto& [plan, cycles] :
           cuda::hopper_backward_tiles(make_problem(w.backward, w.options),
                                       {.multiprocessors = multiprocessors}, &rejected)) {
        const std::string way = plan.tile().family;
        seen.insert(way + (plan.joins() ? " in parts" : " whole"));
        if (plan.row_parts > 1) seen.insert(way + " by rows");
      }
    }
  }
  for (const char* way : {"sm90_backward_sums", "sm90_backward_turns", "sm90_backward"}) {
    for (const char* heads : {" whole", " in parts"})
      EXPECT_TRUE(seen.contains(std::string(way) + heads)) << way << heads;
  }
  EXPECT_TRUE(seen.contains("sm90_backward_sums by rows"));
  EXPECT_TRUE(seen.contains("sm90_backward_turns by rows"));
}

// The rows of the last blocks of keys in two parts, one of which goes on from the sums of the other
// in the same order, so that dK and dV have the bits of whole blocks.
TEST_F(BackwardParts, LastBlocksAreCut) {
  constexpr int kMultiprocessors = 3;
  std::vector<Case> cases(4, {.dtype = DType::kBF16,
                              .batch = 1,
                              .sq = 500,
                              .sk = 890,
                              .hq = 4,
                              .hk = 1,
                              .d = 128,
                              .dv = 128});
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
    w.options.engine = "cuda";
    const Expected expected = expect(w);
    const auto tiles = [&] {
      std::vector<std::string> rejected;
      return cuda::hopper_backward_tiles(make_problem(w.backward, w.options),
                                         {.multiprocessors = kMultiprocessors}, &rejected);
    };
    std::vector<std::vector<double>> gradients;  // dK and dV, exactly
    const auto run = [&] {
      std::set<std::string> seen;  // the ways that cut nothing
      for (const cuda::HopperBackwardTile& tile : tiles())
        if (tile.plan.tile() != tiles()[0].plan.tile()) seen.insert(tile.plan.tile().text());
      const auto is_right = [&] {
        gradients.push_back(read(w.backward.dk));
        gradients.push_back(read(w.backward.dv));
        return backward_is_right(w, expected);
      };
      run_tiles<BackwardArgs>(
          w, w.backward, seen, [&] { w.run_forward(); }, is_right, kMultiprocessors);
    };
    const cuda::HopperBackwardPlan cut = tiles()[0].plan;
    ASSERT_EQ(cut.cut_blocks, kMultiprocessors - 1) << c.name();
    run();
    w.options.max_workspace = cuda::workspace_of(make_problem(w.backward, w.options), cut).end - 1;
    ASSERT_TRUE(tiles()[0].plan.cut_blocks == 0 && tiles()[0].plan.parts == 1) << c.name();
    run();
    ASSERT_EQ(gradients.size(), 4u);
    EXPECT_TRUE(gradients[0] == gradients[2] && gradients[1] == gradients[3]) << c.name();
  }
}

}  // namespace
}  // namespace fulgur::test
