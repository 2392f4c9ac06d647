/// Plans of backward calls, and calls that tests plan.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "backward_call.h"
#include "cuda/sm90/backward_candidates.h"

namespace fulgur::test {

namespace sm90 = cuda::sm90;

using kernels::DqMethod;
using sm90::BackwardPlan;

inline std::vector<BackwardPlan> plans(const Problem& p, std::vector<std::string>* rejected) {
  std::vector<BackwardPlan> all;
  for (const auto& tile : sm90::backward_candidates(p, {}, rejected)) {
    EXPECT_GT(tile.cycles, 0);
    all.push_back(tile.plan);
  }
  return all;
}

inline std::vector<BackwardPlan> plans(const Problem& p) {
  std::vector<std::string> rejected;
  return plans(p, &rejected);
}

/// The plan that stores dS.
inline BackwardPlan stored(const Problem& p) {
  const std::vector<BackwardPlan> all = plans(p);
  const auto found = std::ranges::find(all, DqMethod::kStored, &BackwardPlan::dq_method);
  EXPECT_NE(found, all.end());
  return *found;
}

inline int64_t bytes_of(const Problem& p, const BackwardPlan& plan) {
  return workspace_of(p, plan).end;
}

/// The problem, whose workspace may take so many bytes.
inline Problem within(Problem p, int64_t bytes) {
  p.max_workspace = bytes;
  return p;
}

/// The smallest workspace of the plan that stores dS, which it has if nothing fits.
inline int64_t min_bytes(const Problem& p) { return bytes_of(p, stored(within(p, 1))); }

inline const std::vector<Mask> kMasks = {
    full(),          causal(),     window(300, -1),        window(-1, 200),
    window(100, 50), chunked(150), chunked(333, causal()), chunked(50, window(20, 3))};

inline std::vector<Problem> many_problems() {
  std::vector<Problem> all;
  for (const auto& [d, dv] : {std::pair{1, 1},
                              {16, 64},
                              {64, 64},
                              {80, 128},
                              {128, 128},
                              {128, 256},
                              {192, 128},
                              {256, 256},
                              {256, 16}}) {
    for (const auto& [sq, sk] :
         {std::pair{1, 1}, {1, 5000}, {5000, 1}, {63, 64}, {1000, 1000}, {3000, 4096}}) {
      for (const Mask& mask : kMasks) {
        for (const bool packed : {false, true}) {
          all.push_back(backward_problem({.batch = 3,
                                          .sq = sq,
                                          .sk = sk,
                                          .hq = 6,
                                          .hk = 2,
                                          .d = d,
                                          .dv = dv,
                                          .mask = mask,
                                          .softcap = sq == 1000 ? 30.0 : 0,
                                          .packed = packed}));
        }
      }
    }
  }
  return all;
}

}  // namespace fulgur::test
