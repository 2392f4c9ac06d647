// The backward pass of the case list by every tile: dQ as sums and dQ from stored dS, of which the
// cost model takes one, by the shape.
#include "cuda/hopper_backward_plan.h"
#include "every_tile.h"

namespace fulgur::test {
namespace {

class BackwardTiles : public OnGpu, public testing::WithParamInterface<Case> {};
class BackwardGroups : public OnGpu {};

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

// Groups of q heads whole, as where there are enough blocks of keys for the multiprocessors that
// are planned for, and in parts, as where there are not.
TEST_F(BackwardGroups, WholeAndInParts) {
  const Case few{.dtype = DType::kBF16, .batch = 2, .sq = 200, .sk = 270, .hq = 8, .hk = 2};
  std::vector<Case> cases(3, few);
  cases[0].mask = causal();
  cases[0].dropout = 0.1;
  cases[1].d = cases[1].dv = 128;
  cases[1].mask = window(70, 0);
  cases[1].layout = Layout::kPacked;
  cases[2].d = 256;
  cases[2].dv = 100;
  cases[2].mask = causal();
  cases[2].seqused = true;
  std::set<std::pair<bool, bool>> seen;  // in parts, and whether dQ is summed up
  for (const int multiprocessors : {2, 132}) {
    for (const Case& c : cases) {
      Workload w(c, c.seed());
      w.options.engine = "cuda";
      run_backward_tiles(w, expect(w), multiprocessors);
      std::vector<std::string> rejected;
      for (const cuda::HopperBackwardTile& tile :
           cuda::hopper_backward_tiles(make_problem(w.backward, w.options),
                                       {.multiprocessors = multiprocessors}, &rejected)) {
        seen.insert({tile.plan.joins, tile.plan.sums});
      }
    }
  }
  EXPECT_EQ(seen.size(), 4u);
}

}  // namespace
}  // namespace fulgur::test
