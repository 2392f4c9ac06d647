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

}  // namespace
}  // namespace fulgur::test
