// What calls of a group refuse, by which words.
#include <gtest/gtest.h>

#include <deque>
#include <functional>

#include "ranks.h"

namespace fulgur::test {
namespace {

struct Wrong {
  const char* message;
  std::function<void(ForwardTensors&, Options&, Distribution&)> change;
};

// What is wrong on one rank alone is said on all of them, and the group goes on.
TEST(DistributedErrors, NameTheRankAndTheArgument) {
  const DistributedCase problem{{.dtype = DType::kF32,
                                 .sq = 256,
                                 .sk = 256,
                                 .hq = 4,
                                 .hk = 2,
                                 .d = 16,
                                 .dv = 16,
                                 .mask = causal()},
                                {Sharding::kZigzag}};
  const auto cut = [](Tensor& t, int dim, int64_t size) { t.shape[dim] = size; };
  const std::vector<Wrong> all = {
      {"q: rank 1 has f32, 4 heads of 8 columns in a batch of 1, rank 0 has f32, 4 heads of 16 "
       "columns in a batch of 1",
       [&](auto& f, auto&, auto&) { cut(f.q, 3, 8), cut(f.k, 3, 8); }},
      {"q: rank 1 has f32, 2 heads of 16 columns in a batch of 1, rank 0 has f32, 4 heads of 16 "
       "columns in a batch of 1",
       [&](auto& f, auto&, auto&) { cut(f.q, 2, 2), cut(f.out, 2, 2), cut(f.lse, 1, 2); }},
      {"k: rank 1 has f32, 1 heads of 16 columns in a batch of 1, rank 0 has f32, 2 heads of 16 "
       "columns in a batch of 1",
       [&](auto& f, auto&, auto&) { cut(f.k, 2, 1), cut(f.v, 2, 1); }},
      {"q: ranks have 128, 64 rows, want 64, 128 of the 192 (zigzag)",
       [&](auto& f, auto&, auto&) { cut(f.q, 1, 64), cut(f.out, 1, 64), cut(f.lse, 2, 64); }},
      {"rank 1: v: got shape (1, 64, 2, 16), want (1, 128, 2, 16) = (batch, sk, hk, dv)",
       [&](auto& f, auto&, auto&) { cut(f.v, 1, 64); }},
      {"rank 1: k: not given, want 4 dimensions (batch, seqlen, heads, dim)",
       [](auto& f, auto&, auto&) { f.k = {}; }},
      {"lse: rank 1 has none, rank 0 has f32", [](auto& f, auto&, auto&) { f.lse = {}; }},
      {"rank 1: seqused_q: got 4 dimensions f32 (1, 128, 4, 16), want 1 (batch)",
       [](auto& f, auto&, auto&) { f.seqused_q = f.q; }},
      {"bias: rank 1 has f32, rank 0 has none", [](auto& f, auto&, auto&) { f.bias = f.q; }},
      {"score_mod: rank 1 has score * 2.0, rank 0 has none",
       [](auto&, auto& o, auto&) { o.score_mod = symbols::score * 2; }},
      {"mask_mod: rank 1 has k < q, rank 0 has none",
       [](auto&, auto& o, auto&) { o.mask_mod = symbols::k < symbols::q; }},
      {"window_right: rank 1 has -1, rank 0 has 0", [](auto&, auto& o, auto&) { o.mask = full(); }},
      {"window_left: rank 1 has 9, rank 0 has -1", [](auto&, auto& o, auto&) { o.mask.left = 9; }},
      {"chunk: rank 1 has 8, rank 0 has 0", [](auto&, auto& o, auto&) { o.mask.chunk = 8; }},
      {"top_left: rank 1 has true, rank 0 has false",
       [](auto&, auto& o, auto&) { o.mask.top_left = true; }},
      {"scale: rank 1 has 2, rank 0 has 0.25", [](auto&, auto& o, auto&) { o.scale = 2; }},
      {"softcap: rank 1 has 3, rank 0 has 0", [](auto&, auto& o, auto&) { o.softcap = 3; }},
      {"dropout_p: rank 1 has 0.5, rank 0 has 0", [](auto&, auto& o, auto&) { o.dropout_p = 0.5; }},
      {"invariant: rank 1 has true, rank 0 has false",
       [](auto&, auto& o, auto&) { o.invariant = true; }},
      {"max_workspace: rank 1 has 1000000000, rank 0 has 0",
       [](auto&, auto& o, auto&) { o.max_workspace = 1000000000; }},
      {"rank 1: softcap: got -1, want a finite number >= 0 (0 = off)",
       [](auto&, auto& o, auto&) { o.softcap = -1; }},
      {"rank 1: origin: given with a group, which sets it",
       [](auto&, auto& o, auto&) { o.origin.query = 64; }},
      {"sharding: rank 1 has contiguous, rank 0 has zigzag",
       [](auto&, auto&, auto& d) { d.sharding = Sharding::kContiguous; }},
      {"head_ranks: rank 1 has 2, rank 0 has 1", [](auto&, auto&, auto& d) { d.head_ranks = 2; }},
      {"ring: rank 1 has true, rank 0 has false", [](auto&, auto&, auto& d) { d.ring = true; }},
      {"rank 1: ring: given with invariant, want none: it divides the sums of a row among ranks",
       [](auto&, auto& o, auto& d) { d.ring = o.invariant = true; }},
      {"rank 1: ring: given with 2 ranks that share out heads, want head_ranks 1",
       [](auto&, auto&, auto& d) {
         d.ring = true;
         d.head_ranks = 2;
       }},
      {"rank 1: k: on cpu, want cuda:0 as q",
       [](auto& f, auto&, auto&) {
         f.q.device = {DeviceType::kCuda, 0};
       }},
      {"rank 1: head_ranks: got 3, want a divisor of the 2 ranks and of the 2 heads of k",
       [](auto&, auto&, auto& d) { d.head_ranks = 3; }},
  };
  Workload w(problem.c, 1);
  const DistributedWorkload s{problem, w};
  const int port = free_port();
  Processes processes(2, [&](int rank) {
    const Group group = Group::connect(rank, 2, "127.0.0.1", port, 60);
    const std::vector<int64_t> rows = s.rows(true, 2, rank);
    std::string said;
    // The first call is right, so that all have its plan when one of them makes another one.
    const auto made = [&](size_t i, const auto& call) {
      ForwardTensors f = w.forward;
      std::deque<Taken> memory;
      for (Tensor* t : {&f.q, &f.k, &f.v, &f.out}) {
        memory.push_back(take(*t, 1, rows));
        *t = memory.back().tensor;
      }
      memory.push_back(take(f.lse, 2, rows));
      f.lse = memory.back().tensor;
      Options options = w.options;
      options.threads = 1;
      Distribution distribution = problem.distribution;
      if (rank == 1 && i < all.size()) all[i].change(f, options, distribution);
      said += message_of([&] { call(f, options, distribution); }) + "\n";
    };
    const auto at_once = [&](const ForwardArgs& f, const Options& options, const Distribution& d) {
      forward(f, options, group, d);
    };
    made(all.size(), at_once);
    for (size_t i = 0; i <= all.size(); ++i) made(i, at_once);
    // A rank plans a call, whose plan the others have.
    made(all.size(), [&](const ForwardArgs& f, const Options& options, const Distribution& d) {
      rank == 1 ? plan(f, options, group, d).run(f) : forward(f, options, group, d);
    });
    return bytes_of(said);
  });
  std::string want = "\n";
  for (const Wrong& wrong : all) want += std::string(wrong.message) + "\n";
  want += "\n\n";  // the group goes on
  EXPECT_EQ(processes.text(0), want);
  EXPECT_EQ(processes.text(1), want);
}

// What all ranks have whole, all of them look at.
TEST(DistributedErrors, WholeTensors) {
  Workload w({.sq = 70, .sk = 90, .hq = 2, .hk = 1, .d = 16, .dv = 16}, 1);
  const Group alone = Group::from_env();
  const auto says = [&](const ForwardArgs& args, const Options& options = {}) {
    return message_of([&] { forward(args, options, alone, {}); });
  };
  std::vector<float> numbers(70 * 90);
  std::vector<int32_t> lengths = {71};
  ForwardArgs args = w.forward;
  args.bias = ConstTensor::contiguous(numbers.data(), DType::kF32, {1, 1, 70, 89});
  EXPECT_EQ(says(args),
            "bias: got shape (1, 1, 70, 89), want (1, 2, 70, 90), or 1 for any of them");
  args.bias = {};
  args.lengths.seqused_q = ConstTensor::contiguous(lengths.data(), DType::kI32, {1});
  EXPECT_EQ(says(args), "seqused_q: got 71 at 0, want 0 to 70");
  const DistributedCase documents{
      {.batch = 1, .sq = 70, .sk = 70, .layout = Layout::kPacked}, {}, {{0, 0, 70, 70}}};
  Workload packed(documents.c, 1, documents.lengths);
  EXPECT_EQ(
      says(packed.forward, {.mask_mod = symbols::q0 < symbols::k}),
      "rank 0: score_mod, mask_mod: ask for q0 with a group, want q, a query of its sequence");
}

}  // namespace
}  // namespace fulgur::test
