// The backward pass of the case list by every tile: dQ as sums and dQ from stored dS, of which the
// cost model takes one, by the shape.
#include "every_tile.h"

namespace fulgur::test {
namespace {

class BackwardTiles : public OnGpu, public testing::WithParamInterface<Case> {};

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

}  // namespace
}  // namespace fulgur::test
