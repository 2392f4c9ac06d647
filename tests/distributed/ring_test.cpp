// Rings: the keys of one rank at a time, which take less workspace.
#include <gtest/gtest.h>

#include <deque>
#include <optional>

#include "distributed_cases.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

// Keys of one rank at a time: as right, and the same in every run.
TEST(Distributed, Ring) {
  for (DistributedCase problem : distributed_cases()) {
    SCOPED_TRACE(problem.c.name());
    problem.distribution.ring = true;
    Workload w(problem.c, 12, problem.lengths);
    w.options.threads = 1;
    problem.add(w);
    const DistributedWorkload s{problem, w};
    if (problem.c.packed()) {
      for (const Output& x : s.outputs()) {
        write(x.tensor, std::vector<double>(x.tensor.numel(), 0.0));
      }
    }
    w.run();
    std::vector<std::vector<double>> want;
    for (const Output& x : s.outputs()) {
      want.push_back(read(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor));
    }
    // The oracle knows rows of no sequence, too.
    std::optional<Expected> e;
    if (!problem.c.packed()) e = expect(w);
    for (const int ranks : {2, 3, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s));
      if (e) {
        EXPECT_TRUE(forward_is_right(w, *e));
        EXPECT_TRUE(backward_is_right(w, *e));
      }
      const std::vector<Output> outputs = s.outputs();
      for (size_t i = 0; i < want.size(); ++i) {
        const Output& x = outputs[i];
        const auto got = read(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor);
        double most = 0, off = 0;
        for (size_t at = 0; at < got.size(); ++at) {
          if (std::isfinite(want[i][at])) most = std::max(most, std::abs(want[i][at]));
          if (got[at] != want[i][at]) off = std::max(off, std::abs(got[at] - want[i][at]));
        }
        EXPECT_LE(off, 0.02 * most) << "output " << i;
      }
      if (ranks != 3) continue;
      const auto first = all_bits(w);
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s));
      EXPECT_EQ(all_bits(w) == first, true);
    }
  }
}

// A bound that no gather keeps makes ranks a ring, but where bits of one process are wanted.
TEST(Distributed, RingInLessWorkspace) {
  const DistributedCase problem{{.dtype = DType::kF32, .sq = 512, .sk = 512, .mask = causal()},
                                {Sharding::kZigzag}};
  Workload w(problem.c, 13);
  const DistributedWorkload s{problem, w};
  const int ranks = 4, port = free_port();
  Processes processes(ranks, [&](int rank) {
    const Group group = Group::connect(rank, ranks, "127.0.0.1", port, 60);
    const std::vector<int64_t> rows = s.rows(true, ranks, rank);
    BackwardTensors g = w.backward;
    std::deque<Taken> memory;
    for (Tensor* t : {&g.q, &g.k, &g.v, &g.out, &g.dout, &g.dq, &g.dk, &g.dv}) {
      memory.push_back(take(*t, 1, rows));
      *t = memory.back().tensor;
    }
    memory.push_back(take(g.lse, 2, rows));
    g.lse = memory.back().tensor;
    Options options = w.options;
    options.threads = 1;
    const auto planned = [&](int64_t bytes) {
      options.max_workspace = bytes;
      return plan(g, options, group, problem.distribution);
    };
    const int64_t gathered = planned(0).workspace_bytes();
    const DistributedPlan ring = planned(gathered - 1);
    std::string said = ring.workspace_bytes() < gathered ? "less, " : "not less, ";
    said += ring.explain().find("one rank at a time") == std::string::npos ? "no ring\n" : "ring\n";
    options.invariant = true;
    said += message_of([&] { planned(1000); }).substr(0, 32);
    return bytes_of(said);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(processes.text(rank), "less, ring\nmax_workspace: got 1000 bytes, w");
  }
}

}  // namespace
}  // namespace fulgur::test
