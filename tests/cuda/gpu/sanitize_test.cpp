// Small shapes that take every path of the kernels together, for compute-sanitizer, which slows
// them down a hundredfold.
#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "../plans/dynamic_decode.h"
#include "appended.h"
#include "cached.h"
#include "every_tile.h"
#include "fulgur/merge.h"
#include "shared.h"

namespace fulgur::test {
namespace {

using Sanitize = OnGpu;

constexpr auto kBf16 = DType::kBF16, kF16 = DType::kF16;

/// Whether the forward pass and the gradients of a case, by each tile, follow the reference.
testing::AssertionResult both_right(const Case& c) {
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  w.run_forward();
  if (auto result = w.check_memory(); !result) return result << " in " << c.name();
  const Expected e = expect(w);
  if (auto result = forward_is_right(w, e); !result) return result << " in " << c.name();
  run_backward_tiles(w, e);
  return testing::AssertionSuccess();
}

// Each at the largest head dim that it computes.
TEST_F(Sanitize, EveryTile) {
  std::set<std::string> seen;
  for (const int64_t d : {512, 256, 192, 128, 96, 64, 32}) {
    Workload w({.dtype = kBf16, .sq = 150, .sk = 200, .d = d, .dv = d, .mask = causal()}, 1);
    const Expected e = expect(w);
    run_tiles<ForwardArgs>(
        w, w.forward, seen, [] {}, [&] { return forward_is_right(w, e); });
    run_tiles<BackwardArgs>(
        w, w.backward, seen, [&] { w.run_forward(); }, [&] { return backward_is_right(w, e); });
  }
  for (const int64_t sq : {1, 3, 5, 12}) {  // queries of 8 heads: rows of decode kernels
    for (const int64_t d : {256, 128, 64}) {
      Workload w({.dtype = kF16, .sq = sq, .sk = 400, .hq = 8, .hk = 1, .d = d, .dv = d}, 1);
      const Expected e = expect_forward(w);
      run_tiles<ForwardArgs>(
          w, w.forward, seen, [] {}, [&] { return forward_is_right(w, e); });
    }
  }
}

// One tile has other kernels for other head dims.
TEST_F(Sanitize, EveryTileOfF32) {
  for (const auto& [d, dv] : {std::pair{256, 200}, {130, 192}, {128, 128}, {64, 50}, {8, 24}}) {
    Workload w({.dtype = DType::kF32, .sq = 150, .sk = 200, .d = d, .dv = dv, .mask = causal()}, 1);
    const Expected e = expect(w);
    std::set<std::string> seen;
    run_tiles<ForwardArgs>(
        w, w.forward, seen, [] {}, [&] { return forward_is_right(w, e); });
    run_tiles<BackwardArgs>(
        w, w.backward, seen, [&] { w.run_forward(); }, [&] { return backward_is_right(w, e); });
  }
  for (const int64_t sq : {1, 3}) {  // queries of 8 heads: rows of decode kernels
    for (const auto& [d, dv] : {std::pair{256, 200}, {128, 128}, {50, 64}}) {
      Workload w({.dtype = DType::kF32, .sq = sq, .sk = 600, .hq = 8, .hk = 1, .d = d, .dv = dv},
                 1);
      const Expected e = expect_forward(w);
      std::set<std::string> seen;
      run_tiles<ForwardArgs>(
          w, w.forward, seen, [] {}, [&] { return forward_is_right(w, e); });
    }
  }
}

/// Whether attention has Hopper's kernels here: on other GPUs, and where FULGUR_CUDA_TARGET says
/// so, it has portable ones.
bool has_hoppers_kernels() {
  Workload w({.dtype = kBf16, .sq = 64, .sk = 64}, 1);
  w.options.engine = "cuda";
  EngineMemory memory("cuda");
  const ForwardTensors there = memory.at(w.forward);
  const Plan planned = plan(there, memory.options(w.forward, w.options));
  return planned.details().get<std::string>("kernel").starts_with("sm90");
}
constexpr char kOnlyOnHopper[] = "Hopper's kernels alone compute it";

// With one consumer warpgroup a CTA, as planned for a card on which each key block has an SM.
TEST_F(Sanitize, ShortBackward) {
  Workload w({.dtype = kBf16, .sq = 150, .sk = 200, .hq = 2, .hk = 2, .d = 64, .dv = 64}, 1);
  const Expected e = expect(w);
  run_backward_tiles(w, e, 132);
}
TEST_F(Sanitize, LastKeyBlocksAreCut) {
  Workload w({.dtype = kBf16, .sq = 500, .sk = 890, .hq = 4, .hk = 1, .d = 128, .dv = 128}, 1);
  const Expected e = expect(w);
  run_backward_tiles(w, e, 3);
}
TEST_F(Sanitize, SplitTiles) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .sq = 3, .sk = 2000, .hq = 4, .hk = 2}));
}
TEST_F(Sanitize, SplitBlocksOfABand) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .sq = 300, .sk = 1200, .hq = 2, .mask = causal()}));
}
// dq alone, and dk and dv alone, with the bits of a call that computes all.
TEST_F(Sanitize, GradientsLeftOut) {
  for (const auto& [d, layout] :
       {std::pair{64, Layout::kBshd}, {128, Layout::kPacked}, {256, Layout::kBshd}}) {
    Workload w({.dtype = kBf16,
                .sq = 150,
                .sk = 200,
                .hq = 2,
                .d = d,
                .dv = d,
                .mask = causal(),
                .layout = layout},
               1);
    w.options.engine = "cuda";
    w.options.invariant = true;
    w.run();
    const auto dq = bits(w.backward.dq), dk = bits(w.backward.dk), dv = bits(w.backward.dv);
    w.seal();
    w.run_forward();
    BackwardTensors of_queries = w.backward, of_keys = w.backward;
    of_queries.dk = of_queries.dv = {};
    of_keys.dq = {};
    compute(of_queries, w.options, w.run_options);
    compute(of_keys, w.options, w.run_options);
    EXPECT_TRUE(w.check_memory());
    EXPECT_EQ(bits(w.backward.dq), dq);
    EXPECT_EQ(bits(w.backward.dk), dk);
    EXPECT_EQ(bits(w.backward.dv), dv);
  }
}
TEST_F(Sanitize, Packed) {  // with tails, empty sequences and rows after the last
  EXPECT_TRUE(both_right({.dtype = kBf16,
                          .sq = 150,
                          .sk = 170,
                          .hq = 2,
                          .mask = causal(),
                          .layout = Layout::kPacked}));
}
TEST_F(Sanitize, PackedPaddedUsedKeys) {
  EXPECT_TRUE(both_right({.dtype = kF16,
                          .sq = 130,
                          .sk = 150,
                          .hq = 2,
                          .layout = Layout::kPackedPadded,
                          .seqused = true}));
}
TEST_F(Sanitize, UsedKeys) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .batch = 3, .sq = 70, .sk = 150, .seqused = true}));
}
TEST_F(Sanitize, UsedQueries) {                  // whole tiles of them, some, and none
  for (const Mask& mask : {full(), causal()}) {  // repaired or not
    EXPECT_TRUE(both_right(
        {.dtype = kBf16, .batch = 3, .sq = 200, .sk = 150, .mask = mask, .seqused_q = true}));
  }
}
TEST_F(Sanitize, PackedUsedQueries) {
  EXPECT_TRUE(both_right({.dtype = kF16,
                          .sq = 150,
                          .sk = 170,
                          .hq = 2,
                          .layout = Layout::kPackedPadded,
                          .seqused_q = true,
                          .seqused = true,
                          .dlse = true,
                          .sinks = true}));
}
TEST_F(Sanitize, UsedQueriesOfFew) {
  EXPECT_TRUE(right({.dtype = kBf16,
                     .batch = 3,
                     .sq = 4,
                     .sk = 300,
                     .hq = 4,
                     .hk = 2,
                     .mask = causal(),
                     .seqused_q = true}));
}
// SplitToFill: few q blocks in as many splits as there are CTAs, each of about as many keys; of 33
// sequences lanes have two.
TEST_F(Sanitize, SplitsThatFillTheCard) {
  for (const auto& [batch, group, d] : {std::array<int64_t, 3>{1, 4, 64},
                                        {1, 4, 128},
                                        {4, 4, 64},
                                        {1, 8, 256},
                                        {4, 1, 128},
                                        {33, 4, 64}}) {
    EXPECT_TRUE(right({.dtype = kBf16,
                       .batch = batch,
                       .sq = 9,
                       .sk = batch > 32 ? 200 : 500,
                       .hq = group,
                       .hk = 1,
                       .d = d,
                       .dv = d,
                       .mask = causal(),
                       .seqused_q = batch > 1,
                       .seqused = true}));
  }
}
// The same of the warp path: more than 64 splits are combined in groups of them.
TEST_F(Sanitize, SplitsThatFillTheCardOfFewRows) {
  for (const auto& [batch, sk, hk, d] : {std::array<int64_t, 4>{1, 4600, 1, 64},
                                         {1, 500, 4, 128},
                                         {2, 700, 2, 64},
                                         {1, 300, 1, 256}}) {
    EXPECT_TRUE(right({.dtype = kBf16,
                       .batch = batch,
                       .sq = 1,
                       .sk = sk,
                       .hq = 8,
                       .hk = hk,
                       .d = d,
                       .dv = d,
                       .mask = causal(),
                       .seqused = true}));
  }
}
/// Runs packed sequences of so many keys and `sq` queries, the sixth without any, of more q blocks
/// than CTAs, with the dynamic schedule.
void run_dynamic(const std::vector<int64_t>& keys, int64_t sq, int64_t group, int64_t d) {
  SCOPED_TRACE(testing::Message() << sq << " " << group << " " << d);
  std::vector<Rows> rows;
  for (const int64_t sk : keys) rows.push_back({0, 0, rows.size() == 5 ? 0 : sq, sk});
  const int64_t hk = enough_heads(keys.size());
  Workload w({.dtype = kBf16,
              .sq = sq,
              .sk = *std::max_element(keys.begin(), keys.end()),
              .hq = group * hk,
              .hk = hk,
              .d = d,
              .dv = d,
              .mask = causal(),
              .layout = Layout::kPacked,
              .sinks = d == 128},
             3, rows);
  w.options.engine = "cuda";
  const Expected e = expect_forward(w);
  run_dynamic_plans(w.forward, w.options, 2, [&](int) { EXPECT_TRUE(forward_is_right(w, e)); });
}

// More q blocks than CTAs, which request one after another: of equal lengths, and with one that is
// split, a short one, and one each without keys and without queries.
TEST_F(Sanitize, Dynamic) {
  if (!has_hoppers_kernels()) GTEST_SKIP() << kOnlyOnHopper;
  const std::vector<int64_t> equal(14, 800);
  std::vector<int64_t> mixed(10, 800);
  for (const int64_t sk : {0, 300, 2500}) mixed.push_back(sk);
  mixed[1] = 17000;
  for (const auto& [sq, group, d] :
       {std::array<int64_t, 3>{5, 8, 128}, {16, 4, 128}, {16, 8, 64}, {16, 2, 256}}) {
    run_dynamic(equal, sq, group, d);
    run_dynamic(mixed, sq, group, d);
  }
}
// On the warp path, too; runs_test has longer ones.
TEST_F(Sanitize, DynamicOfFewRows) {
  if (!has_hoppers_kernels()) GTEST_SKIP() << kOnlyOnHopper;
  std::vector<int64_t> keys(10, 800);
  for (const int64_t sk : {0, 300, 2500}) keys.push_back(sk);
  keys[1] = 17000;
  run_dynamic(keys, 1, 4, 128);
  run_dynamic(keys, 1, 16, 64);
}
// A q block of so many splits that all CTAs combine them, and a last round of few q blocks, which
// are split. The emulator runs it with 16 SMs.
TEST_F(Sanitize, DynamicWithSplits) {
  if (!has_hoppers_kernels()) GTEST_SKIP() << kOnlyOnHopper;
  std::vector<int64_t> uneven(24, 600);
  uneven[7] = 40000;
  const std::vector<int64_t> even(20, 4000);
  for (const auto& keys : {uneven, even}) {
    run_dynamic(keys, 16, 8, 64);
    run_dynamic(keys, 8, 8, 128);
  }
}
// Over pages, whose keys TMA brings, or lanes of the warps that load.
TEST_F(Sanitize, DynamicOverPages) {
  if (!has_hoppers_kernels()) GTEST_SKIP() << kOnlyOnHopper;
  const int64_t hk = enough_heads(12);
  for (const int64_t page : {16, 5}) {
    for (const int64_t sq : {5, 16}) {
      Workload w({.dtype = kBf16,
                  .batch = 12,
                  .sq = sq,
                  .sk = 1200,
                  .hq = 8 * hk,
                  .hk = hk,
                  .mask = causal(),
                  .seqused = true},
                 4);
      w.options.engine = "cuda";
      Cached cached(w, {CacheShape::Order::kNhd, CacheShape::Index::kTable, page}, 8);
      const Expected e = expect_forward(w);
      SCOPED_TRACE(testing::Message() << page << " " << sq);
      run_dynamic_plans(cached.forward, w.options, 1,
                        [&](int) { ASSERT_TRUE(forward_is_right(w, e)); });
    }
  }
}
// All that scores may, with heads that leave few registers, and parts that are put together.
TEST_F(Sanitize, FewRowsOfTheWidestHeads) {
  for (const int64_t sq : {1, 12}) {
    EXPECT_TRUE(right({.dtype = kF16,
                       .batch = 3,
                       .sq = sq,
                       .sk = 330,
                       .hq = 8,
                       .hk = 2,
                       .d = 256,
                       .dv = 256,
                       .mask = window(300, 3),
                       .softcap = 2,
                       .alibi = Alibi::kBatchHeads,
                       .seqused = true,
                       .sinks = true}));
  }
}
// An invariant call with sequences of few rows, whose keys are split, and with rows that are
// copied; another kernel computes one of the sequences.
TEST_F(Sanitize, InvariantCallsOfFewAndMany) {
  for (const int64_t d : {64, 36}) {
    Workload w({.dtype = kBf16,
                .sq = 40,
                .sk = 1100,
                .hq = 2,
                .hk = 1,
                .d = d,
                .dv = 40,
                .mask = causal(),
                .layout = Layout::kPacked},
               1, {{0, 0, 2, 1100}, {0, 0, 40, 90}, {0, 0, 32, 1050}, {0, 0, 0, 5}, {0, 0, 3, 0}});
    w.options.engine = "cuda";
    w.options.invariant = true;
    w.run_forward();
    EXPECT_TRUE(w.check_memory());
    EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
  }
}
TEST_F(Sanitize, Window) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .sq = 300, .sk = 350, .hq = 2, .mask = window(30, 10)}));
}
TEST_F(Sanitize, Chunks) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .sq = 300, .sk = 350, .hq = 2, .mask = chunked(90)}));
}
TEST_F(Sanitize, RowsWithoutKeys) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .sq = 300, .sk = 100, .mask = causal()}));
}
TEST_F(Sanitize, NoKeys) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .batch = 2, .sq = 70, .sk = 0}));
}
TEST_F(Sanitize, Softcap) {
  EXPECT_TRUE(both_right({.dtype = kBf16, .sq = 100, .sk = 150, .mask = causal(), .softcap = 2}));
}
TEST_F(Sanitize, Alibi) {
  EXPECT_TRUE(both_right({.dtype = kF16,
                          .batch = 2,
                          .sq = 100,
                          .sk = 150,
                          .hq = 2,
                          .mask = causal(),
                          .alibi = Alibi::kBatchHeads}));
}
TEST_F(Sanitize, Sinks) {
  EXPECT_TRUE(both_right({.dtype = kF16,
                          .sq = 130,
                          .sk = 100,
                          .hq = 2,
                          .mask = causal(),
                          .layout = Layout::kPacked,
                          .dlse = true,
                          .sinks = true}));
}
TEST_F(Sanitize, Dropout) {
  EXPECT_TRUE(both_right({.dtype = kBf16,
                          .batch = 2,
                          .sq = 100,
                          .sk = 150,
                          .hq = 2,
                          .mask = causal(),
                          .dropout = 0.25}));
}
TEST_F(Sanitize, CopiesAndElements) {  // odd rows, that TMA cannot address
  EXPECT_TRUE(
      both_right({.dtype = kBf16, .batch = 2, .sq = 70, .sk = 150, .hq = 2, .d = 63, .dv = 33}));
}
TEST_F(Sanitize, OddStrides) {
  EXPECT_TRUE(both_right(
      {.dtype = kBf16, .batch = 2, .sq = 70, .sk = 150, .hq = 2, .layout = Layout::kPadded}));
}
TEST_F(Sanitize, DimsThatDiffer) {
  EXPECT_TRUE(both_right(
      {.dtype = kBf16, .sq = 150, .sk = 150, .hq = 2, .d = 192, .dv = 128, .mask = causal()}));
}
/// Codes of e4m3 for tensors of a call.
class CodesOfTensors {
 public:
  /// The call with codes for these tensors, which get the numbers of the codes.
  ForwardTensors of(Workload& w, std::initializer_list<Tensor ForwardTensors::*> tensors) {
    ForwardTensors call = w.forward;
    for (Tensor ForwardTensors::*one : tensors) {
      const Tensor& numbers = w.forward.*one;
      const auto rank = static_cast<size_t>(numbers.rank);
      Storage& storage = codes_.emplace_back(DType::kE4M3, numbers.numel());
      call.*one = storage.view(0, std::span(numbers.shape).first(rank),
                               std::span(numbers.strides).first(rank));
      std::vector<double> x = read(numbers);
      for (double& number : x) number = rounded(number, DType::kE4M3);
      write(call.*one, x);
      write(numbers, x);
    }
    return call;
  }

 private:
  std::deque<Storage> codes_;
};

TEST_F(Sanitize, Codes) {  // of e4m3 in q, k and v
  if (!has_hoppers_kernels()) GTEST_SKIP() << kOnlyOnHopper;
  for (const int64_t d : {64, 128, 256}) {
    for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
      Case c{.dtype = kBf16, .batch = 2, .sq = 150, .sk = 200, .hq = 2, .d = d, .dv = d};
      c.mask = layout == Layout::kPacked ? causal() : full();
      c.layout = layout;
      c.seqused = true;
      Workload w(c, 1);
      CodesOfTensors codes;
      const ForwardTensors call =
          codes.of(w, {&ForwardTensors::q, &ForwardTensors::k, &ForwardTensors::v});
      w.seal();
      const Expected e = expect_forward(w);
      w.options.engine = "cuda";
      compute(call, w.options);
      const double most = 0x1p-9 * e.unit.out;  // products of e4m3 are added with 13 bits
      EXPECT_TRUE(within("out", w.forward.out, e.reference.out, e.naive.out, 2, most));
      EXPECT_TRUE(w.check_memory());
    }
  }
}

TEST_F(Sanitize, ConvertedCodes) {  // in k and v, for few and for many rows
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    for (const int64_t sq : {3, 150}) {
      Case c{.dtype = DType::kF32, .batch = 2, .sq = sq, .sk = 200, .hq = 4, .hk = 2};
      c.layout = layout;
      c.seqused = layout == Layout::kBshd;
      Workload w(c, 1);
      CodesOfTensors codes;
      const ForwardTensors call = codes.of(w, {&ForwardTensors::k, &ForwardTensors::v});
      w.seal();
      w.options.engine = "cuda";
      compute(call, w.options);
      EXPECT_TRUE(w.check_memory());
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
    }
  }
}

TEST_F(Sanitize, PoisonInHiddenKeys) {
  Workload w({.dtype = kBf16, .sq = 100, .sk = 100, .mask = causal()}, 1);
  w.options.engine = "cuda";
  std::vector<double> v = read(w.forward.v);
  v[99 * 64] = std::numeric_limits<double>::quiet_NaN();
  write(w.forward.v, v);
  w.seal();
  w.run_forward();
  EXPECT_TRUE(w.check_memory());
  EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
}
TEST_F(Sanitize, TreeMask) {  // with NaN in the values of a token
  Workload w({.dtype = kBf16, .sq = 12, .sk = 100, .hq = 4, .hk = 2, .tree = Tree::kRandom}, 1);
  w.options.engine = "cuda";
  std::vector<double> v = read(w.forward.v);
  v[95 * 2 * 64] = std::numeric_limits<double>::quiet_NaN();
  write(w.forward.v, v);
  w.seal();
  w.run_forward();
  EXPECT_TRUE(w.check_memory());
  EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
}
TEST_F(Sanitize, SharedPrefixes) {  // with NaN where members would read their own
  for (const auto index : {CacheShape::Index::kTable, CacheShape::Index::kLists}) {
    Workload w({.dtype = kBf16, .batch = 4, .sq = 2, .sk = 150, .hq = 4, .hk = 2, .sinks = true},
               1);
    w.options.engine = "cuda";
    Shared shared(w, {CacheShape::Order::kNhd, index, 16}, {0, 3, 3, 4}, {140, 0, 0});
    const Expected e = expect_forward(w);
    shared.poison();
    w.seal();
    compute(shared.forward, w.options);
    EXPECT_TRUE(w.check_memory());
    EXPECT_TRUE(forward_is_right(w, e));
  }
}
TEST_F(Sanitize, Append) {  // by 16 bytes and by elements, to pages and to rows of the batch
  for (const bool aligned : {true, false}) {
    for (const CacheShape::Index index :
         {CacheShape::Index::kTable, CacheShape::Index::kLists, CacheShape::Index::kBatch}) {
      for (const Layout layout : {Layout::kPacked, Layout::kBshd}) {
        Appended a({.c = {.dtype = kBf16,
                          .batch = 3,
                          .sq = 5,
                          .sk = 29,
                          .hq = 4,
                          .hk = 2,
                          .d = aligned ? 64 : 27,
                          .dv = aligned ? 128 : 20,
                          .layout = layout},
                    .shape = {CacheShape::Order::kHnd, index, 3, true},
                    .rotary_dim = 16,
                    .interleaved = layout == Layout::kPacked,
                    .aligned = aligned},
                   1);
        a.w.options.engine = "cuda";
        a.run();
        EXPECT_TRUE(a.check());
      }
    }
  }
}
/// Runs a call with lengths, tables and positions of which one at a time is wild. What is written
/// is anything, and lies in the outputs.
template <class Run>
void with_wild_numbers(Case c, int64_t page, const Run& run) {
  c.layout = Layout::kPacked;
  for (const CacheShape::Index index :
       {CacheShape::Index::kTable, CacheShape::Index::kLists, CacheShape::Index::kBatch}) {
    for (const double value : {-1.0, 1e6, 2147483647.0, -2147483648.0}) {
      for (int which = 0; which < 7; ++which) {
        Appended a({.c = c,
                    .shape = {CacheShape::Order::kNhd, index, page},
                    .rotary_dim = 16,
                    .positions = true},
                   1);
        a.w.options.engine = "cuda";
        a.w.options.max_seqlen_q = c.sq;
        const Tensor ints =
            std::array{a.args.cache_seqlens, a.args.rotary_seqlens,  a.args.cu_seqlens_k_new,
                       a.args.cu_seqlens_q,  a.args.cache_batch_idx, a.args.page_table,
                       a.args.page_indptr}[static_cast<size_t>(which)];
        if (!ints.given()) continue;
        write(ints, std::vector<double>(static_cast<size_t>(ints.numel()), value));
        run(a);
      }
    }
  }
}
TEST_F(Sanitize, AppendWithoutPlaces) {
  with_wild_numbers({.dtype = kBf16, .sq = 5, .sk = 29, .hk = 1}, 4, [](Appended& a) { a.run(); });
}
TEST_F(Sanitize, OneCall) {  // by the kernel that attends, of every kind of tile, and before it
  for (const int64_t sq : {1, 5, 16, 200}) {
    for (const CacheShape::Index index :
         {CacheShape::Index::kTable, CacheShape::Index::kLists, CacheShape::Index::kBatch}) {
      for (const Layout layout : {Layout::kPacked, Layout::kBshd}) {
        Appended a({.c = {.dtype = kBf16,
                          .batch = 3,
                          .sq = sq,
                          .sk = 150,
                          .hq = 8,
                          .hk = 2,
                          .d = 64,
                          .dv = 128,
                          .mask = sq == 5 ? window(30, 0) : causal(),
                          .layout = layout},
                    .shape = {CacheShape::Order::kNhd, index, sq == 5 ? 3 : 16, sq == 16},
                    .rotary_dim = 32,
                    .interleaved = layout == Layout::kPacked,
                    .aligned = sq != 16},
                   1);
        a.w.options.engine = "cuda";
        a.run_with_attention();
        EXPECT_TRUE(a.check_rows());
      }
    }
  }
}
TEST_F(Sanitize, OneCallWithoutPlaces) {
  with_wild_numbers({.dtype = kBf16, .sq = 5, .sk = 29, .hq = 2, .hk = 1}, 16,
                    [](Appended& a) { a.run_with_attention(); });
}
TEST_F(Sanitize, Merge) {
  for (const int64_t d : {64, 7}) {
    const DeviceTensor a(kBf16, {2, 5, 3, d}, 1), b(DType::kF32, {2, 5, 3, d}, 2);
    const DeviceTensor la(DType::kF32, {2, 3, 5}, 3), lb(DType::kF32, {2, 3, 5}, 4);
    merge(std::vector<Partial>{{a, la}, {b, lb}}, {a, la});
    EXPECT_EQ(message_of([] { cuda::synchronize(); }), "");
  }
}
TEST_F(Sanitize, Replay) {
  const Stream stream;
  const DeviceCall call(1, 3, 2000, 4, 64);
  const Plan plan = fulgur::plan(call.args());
  const auto result = call.result_of(plan);
  const Graph graph(stream, [&] { plan.run(call.args(), stream.run()); });
  for (int i = 0; i < 2; ++i) {
    call.poison(stream.get());
    graph.launch(stream);
    stream.synchronize();
    EXPECT_EQ(call.result(), result);
  }
}

}  // namespace
}  // namespace fulgur::test
