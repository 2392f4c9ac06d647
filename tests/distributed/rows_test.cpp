// Rows of ranks: the bits of one device where calls are invariant, results as right as its
// otherwise.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <deque>

#include "distributed_cases.h"
#include "distributed_on_gpus.h"
#include "on_gpu.h"
#include "oracle.h"
#include "seed.h"

namespace fulgur::test {
namespace {

// Any number of processes gives the bits of one device.
TEST(Distributed, InvariantToRanks) {
  for (const DistributedCase& problem : distributed_cases()) {
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 1, problem.lengths);
    w.options.threads = 1;
    w.options.invariant = true;
    problem.add(w);
    const DistributedWorkload s{problem, w};
    if (problem.c.packed()) {
      for (const Output& x : s.outputs()) {
        write(x.tensor, std::vector<double>(x.tensor.numel(), 0.0));
      }
    }
    w.run();
    std::vector<Bytes> want;
    for (const Output& x : s.outputs()) {
      // Only the rows of sequences are compared: packed tensors have others.
      want.push_back(bits(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor));
    }
    const size_t exact = want.size() - (w.backward.tensors.empty() ? 0 : 1);
    const auto table =
        exact < want.size() ? read(w.backward.tensors[0].grad) : std::vector<double>();
    for (const int ranks : {1, 2, 3, 4, 8}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s));
      const std::vector<Output> outputs = s.outputs();
      for (size_t i = 0; i < exact; ++i) {
        const Output& x = outputs[i];
        EXPECT_EQ(bits(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor) == want[i], true)
            << "output " << i;
      }
      for (size_t i = 0; i < table.size(); ++i) {
        EXPECT_NEAR(read(w.backward.tensors[0].grad)[i], table[i], 1e-5);
      }
    }
  }
}

// Less memory takes more steps of fewer heads, down to one kv head, and gives the same bits.
TEST(Distributed, WorkspaceIsBounded) {
  Workload w({.dtype = DType::kF32, .sq = 300, .sk = 300, .hq = 8, .hk = 8, .mask = causal()}, 11);
  w.options.threads = 1;
  const Group alone = Group::from_env();
  const Distribution zigzag{.sharding = Sharding::kZigzag};
  for (const bool invariant : {false, true}) {
    const auto bounded = [&](const auto& tensors) {
      SCOPED_TRACE(testing::Message() << (invariant ? "invariant" : "fast"));
      Options options = w.options;
      options.invariant = invariant;
      const auto planned = [&](int64_t bytes) {
        options.max_workspace = bytes;
        return plan(tensors, options, alone, zigzag);
      };
      const DistributedPlan fastest = planned(0);
      fastest.run(tensors);
      const auto want = all_bits(w);
      const std::string said = message_of([&] { planned(1); });
      const std::string before = "max_workspace: got 1 bytes, want at least ";
      ASSERT_EQ(said.substr(0, before.size()), before);
      const int64_t least = std::stoll(said.substr(before.size()));
      EXPECT_LT(least, fastest.workspace_bytes());
      for (int64_t bytes = least; bytes < fastest.workspace_bytes(); bytes += bytes / 3) {
        const DistributedPlan smaller = planned(bytes);
        EXPECT_LE(smaller.workspace_bytes(), bytes);
        EXPECT_GE(smaller.workspace_bytes(), least);
        EXPECT_NE(smaller.explain(), fastest.explain());
        smaller.run(tensors);
        EXPECT_EQ(all_bits(w), want);
      }
      EXPECT_NE(message_of([&] { planned(least - 1); }), "");
    };
    bounded(static_cast<ForwardArgs>(w.forward));
    bounded(static_cast<BackwardArgs>(w.backward));
  }
}

// Ranks that have no memory in common, as one of them can make none. Files it may open, as
// UndefinedBehaviorSanitizer does.
TEST(Distributed, RowsByMessages) {
  const DistributedCase problem = distributed_cases().front();
  Workload w(problem.c, 9);
  w.options.threads = 1;
  for (const bool invariant : {true, false}) {
    w.options.invariant = invariant;
    w.run();
    const auto want = all_bits(w);
    const Expected e = expect(w);
    ASSERT_NO_FATAL_FAILURE(compute_by(3, {problem, w}, 0, [](int rank) {
      if (rank != 1) return;
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit bytes{0, 0};
      setrlimit(RLIMIT_FSIZE, &bytes);
    }));
    if (invariant) {
      EXPECT_EQ(all_bits(w) == want, true);
    }
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// Ranks that exchange heads for rows, all of them or those of a node.
TEST(Distributed, RanksThatShareOutHeads) {
  DistributedCase problem{{.dtype = DType::kBF16,
                           .batch = 2,
                           .sq = 300,
                           .sk = 300,
                           .hq = 8,
                           .hk = 4,
                           .d = 32,
                           .dv = 32,
                           .mask = causal(),
                           .alibi = Alibi::kHeads,
                           .dropout = 0.2,
                           .sinks = true},
                          {}};
  Workload w(problem.c, 2);
  w.options.threads = 1;
  const Expected e = expect(w);
  for (const bool invariant : {true, false}) {
    w.options.invariant = invariant;
    w.run();
    const auto want = all_bits(w);
    for (const auto& [ranks, head_ranks] : {std::pair{4, 4}, {4, 2}, {2, 2}, {8, 4}}) {
      SCOPED_TRACE(testing::Message() << head_ranks << " of " << ranks << " share out heads");
      problem.distribution = {head_ranks == ranks ? Sharding::kContiguous : Sharding::kZigzag,
                              head_ranks};
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}));
      if (invariant) {
        EXPECT_EQ(all_bits(w) == want, true);
      }
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
    }
  }
}

// A rank alone, for which its own rows stand for those of the others.
void expect_simulated(Device device) {
  const DType dtype = device == Device{} ? DType::kF32 : DType::kBF16;
  const DistributedCase problem{{.dtype = dtype, .sq = 512, .sk = 512, .hq = 4, .mask = causal()},
                                {Sharding::kZigzag}};
  Workload w(problem.c, 15);
  w.options.invariant = true;
  w.options.threads = 1;
  const DistributedWorkload s{problem, w};
  const std::vector<int64_t> rows = s.rows(true, 4, 1);
  for (const Tensor* t : {&w.forward.k, &w.forward.v}) {
    const Taken own = take(*t, 1, rows);
    for (int rank = 0; rank < 4; ++rank) {
      each_pair(*t, own.tensor, 1, s.rows(false, 4, rank),
                [&](std::byte* x, std::byte* y) { std::memcpy(x, y, size_of(t->dtype)); });
    }
  }
  const std::string said =
      Processes(1, [&](int) {
        ForwardTensors whole = w.forward, f = w.forward;
        std::deque<Taken> memory;
        for (Tensor* t : {&f.q, &f.k, &f.v, &f.out}) {
          memory.push_back(take(*t, 1, rows));
          *t = memory.back().tensor;
        }
        f.lse = {};
        whole.lse = {};
        const Tensor all = whole.out, own = f.out;
        OnGpu gpu(device);
        for (ForwardTensors* tensors : {&whole, &f}) {
          for (Tensor* t : {&tensors->q, &tensors->k, &tensors->v, &tensors->out}) {
            gpu.place(*t);
          }
        }
        forward(whole, w.options);
        forward(f, w.options, Group::simulated(1, 4), problem.distribution);
        gpu.bring_back();
        const bool same = bits(take(all, 1, rows).tensor) == bits(own);
        return bytes_of(same ? "same bits" : "other bits");
      }).text(0);
  EXPECT_EQ(said, "same bits");
}

TEST(Distributed, SimulatedRank) { expect_simulated({}); }

// Without `invariant` gradients are sums of parts: as right, and the same in every run.
TEST(Distributed, FastGradients) {
  for (const DistributedCase& problem : distributed_cases()) {
    if (problem.c.packed()) continue;  // the oracle knows rows of no sequence, too
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 3);
    w.options.threads = 1;
    problem.add(w);
    w.run();
    const Expected e = expect(w);
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}));
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
      const auto first = all_bits(w);
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}));
      EXPECT_EQ(all_bits(w) == first, true);
    }
  }
}

/// The outputs of the workload, of rows of sequences.
std::vector<Bytes> outputs_of(const DistributedWorkload& s) {
  std::vector<Bytes> all;
  for (const Output& x : s.outputs()) {
    all.push_back(bits(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor));
  }
  return all;
}

/// What a GPU alone computes, into the workload's outputs.
void compute_alone(const DistributedWorkload& s) {
  const Bytes all = Processes(1, [&](int) {
                      s.w.options.engine = "cuda";
                      s.w.run();
                      Bytes all;
                      for (const Bytes& its : outputs_of(s)) {
                        all.insert(all.end(), its.begin(), its.end());
                      }
                      return all;
                    }).result(0);
  ASSERT_TRUE(put(s, 1, 0, all));
}

/// Every second one of the problems that GPUs compute, by the day: their kernels take seconds to
/// compile.
std::vector<DistributedCase> gpu_cases() {
  std::vector<DistributedCase> all, some;
  for (DistributedCase& problem : distributed_cases()) {
    const Case& c = problem.c;
    Workload w(c, 1, problem.lengths);
    problem.add(w);
    if (c.dtype == DType::kF64) continue;
    if (c.dtype == DType::kF32) problem.c.dtype = DType::kBF16;
    all.push_back(problem);
  }
  all.push_back({{.dtype = DType::kBF16,
                  .sq = 400,
                  .sk = 400,
                  .hq = 8,
                  .hk = 4,
                  .d = 128,
                  .dv = 128,
                  .mask = causal(),
                  .dropout = 0.2,
                  .sinks = true},
                 {Sharding::kZigzag, 2}});
  for (size_t n = test_seed() % 2; n < all.size(); n += 2) some.push_back(all[n]);
  return some;
}

TEST_F(DistributedOnGpus, SimulatedRank) { expect_simulated({DeviceType::kCuda, 0}); }

TEST_F(DistributedOnGpus, OfFewRows) {
  for (const bool invariant : {false, true}) {
    const DistributedCase problem{{.dtype = DType::kBF16,
                                   .sq = 130,
                                   .sk = 130,
                                   .hq = 4,
                                   .hk = 2,  // two steps
                                   .d = 32,
                                   .dv = 32,
                                   .mask = causal(),
                                   .dropout = 0.2,
                                   .sinks = true},
                                  {Sharding::kZigzag}};
    Workload w(problem.c, 8);
    w.options.invariant = invariant;
    const Expected e = expect(w);
    ASSERT_NO_FATAL_FAILURE(compute_by(2, {problem, w}, count_));
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// A rank computes expressions with the batch, head, query and key of the whole call.
TEST_F(DistributedOnGpus, Expressions) {
  DistributedCase problem{{.dtype = DType::kBF16,
                           .batch = 2,
                           .sq = 140,
                           .sk = 140,
                           .hq = 4,
                           .hk = 2,
                           .d = 32,
                           .dv = 32,
                           .mask = causal(),
                           .seqused = true},
                          {Sharding::kZigzag},
                          {},
                          add_expressions};
  Workload w(problem.c, 11);
  problem.add(w);
  const Expected e = expect(w);
  ASSERT_NO_FATAL_FAILURE(compute_by(2, {problem, w}, count_));
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
}

// Lengths of sequences of the batch, and a bias, whose gradient all ranks get.
TEST_F(DistributedOnGpus, WholeTensors) {
  const DistributedCase problem{{.dtype = DType::kBF16,
                                 .batch = 2,
                                 .sq = 100,
                                 .sk = 140,
                                 .hq = 2,
                                 .hk = 1,
                                 .d = 32,
                                 .dv = 32,
                                 .mask = causal(),
                                 .seqused_q = true,
                                 .seqused = true,
                                 .bias = Bias::kHeads},
                                {Sharding::kContiguous}};
  Workload w(problem.c, 10);
  const Expected e = expect(w);
  ASSERT_NO_FATAL_FAILURE(compute_by(2, {problem, w}, count_));
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
}

TEST_F(DistributedOnGpus, InvariantToRanks) {
  for (const DistributedCase& problem : gpu_cases()) {
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 6, problem.lengths);
    w.options.invariant = w.options.deterministic = true;
    problem.add(w);
    const DistributedWorkload s{problem, w};
    ASSERT_NO_FATAL_FAILURE(compute_alone(s));
    const auto want = outputs_of(s);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s, count_));
      const auto got = outputs_of(s);
      for (size_t i = 0; i < got.size(); ++i) {
        const Tensor of = s.outputs()[i].tensor;
        // Sums over the rows of all ranks: tensors of expressions, and a bias but for kAll.
        const bool sums =
            i >= 5 && of.data != w.backward.dsinks.data && problem.c.bias != Bias::kAll;
        if (!sums) {
          EXPECT_EQ(got[i] == want[i], true) << "output " << i;
        }
      }
    }
  }
}

TEST_F(DistributedOnGpus, FastGradientsAndRings) {
  for (DistributedCase problem : gpu_cases()) {
    if (problem.c.packed()) continue;  // the oracle knows rows of no sequence, too
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 7);
    w.options.deterministic = true;
    problem.add(w);
    const Expected e = expect(w);
    for (const auto& [ranks, ring] : {std::pair{2, false}, {3, false}, {2, true}, {3, true}}) {
      const int head_ranks = problem.distribution.head_ranks;
      if (ranks % head_ranks != 0 || (ring && head_ranks > 1)) continue;
      SCOPED_TRACE(testing::Message() << ranks << (ring ? " ranks in a ring" : " ranks"));
      problem.distribution.ring = ring;
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}, count_));
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
      const auto first = all_bits(w);
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}, count_));
      EXPECT_EQ(all_bits(w) == first, true);
    }
  }
}

}  // namespace
}  // namespace fulgur::test
