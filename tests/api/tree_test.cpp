// Tree masks with the case list: what hidden tokens hold, chains, words that change, and that
// neighbours and layouts do not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "cached.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

using Order = CacheShape::Order;
using Index = CacheShape::Index;

constexpr DType kDtypes[] = {DType::kBF16, DType::kF16, DType::kF32};

class TreeMask : public EveryEngine {};

uint64_t* words(const Workload& w) { return static_cast<uint64_t*>(w.forward.tree_mask.data); }

// Draft tokens of few rows and of many, over keys that end inside a tile and at its end.
std::vector<Case> drafts(DType dtype) {
  std::vector<Case> all;
  for (const int64_t sq : {2, 5, 64}) {
    for (const int64_t sk : {64, 150}) {
      all.push_back({.dtype = dtype,
                     .batch = 2,
                     .sq = sq,
                     .sk = sk,
                     .hq = 4,
                     .hk = 2,
                     .d = 24,
                     .dv = 40,
                     .tree = Tree::kAncestors});
    }
  }
  return all;
}

// Row (b, j, head) of a dense tensor, in all elements.
void fill_row(const Tensor& t, int64_t row, double value) {
  std::vector<double> all = read(t);
  const int64_t width = t.shape[2] * t.shape[3];
  for (int64_t i = 0; i < width; ++i) all[row * width + i] = i % 3 == 2 ? -value : value;
  write(t, all);
}

// NaN and infinity in the keys and values of tokens reach the queries that see them, as the
// reference has it, and no other.
TEST_P(TreeMask, PoisonInHiddenTokens) {
  for (const DType dtype : kDtypes) {
    for (const Case& c : drafts(dtype)) {
      for (const double poison :
           {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        for (const int64_t token : {c.sq - 1, c.sq / 2}) {
          SCOPED_TRACE(c.name() + " token " + std::to_string(token) + (poison > 0 ? " inf" : ""));
          Workload w(c, 3);
          w.options.engine = engine();
          const int64_t row = c.sk - c.sq + token;
          for (int64_t b = 0; b < c.batch; ++b) {
            fill_row(w.forward.v, b * c.sk + row, poison);
            if (poison != poison) fill_row(w.forward.k, b * c.sk + row, poison);
          }
          w.seal();
          if (!computes([&] { w.run_forward(); })) continue;
          EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
          EXPECT_TRUE(w.check_memory());
        }
      }
    }
  }
}

// A token that no query sees is as if it were not there: its K and V change no bit.
TEST_P(TreeMask, TokensThatNoQuerySees) {
  for (const DType dtype : kDtypes) {
    for (const Case& c : drafts(dtype)) {
      SCOPED_TRACE(c.name());
      Workload w(c, 4);
      w.options.engine = engine();
      for (int64_t i = 0; i < c.batch * c.sq; ++i) words(w)[i] &= ~uint64_t{2};
      w.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      const auto want = read(w.forward.out), want_lse = read(w.forward.lse);
      for (int64_t b = 0; b < c.batch; ++b) {
        for (const Tensor& t : {w.forward.k, w.forward.v}) {
          fill_row(t, b * c.sk + c.sk - c.sq + 1, std::numeric_limits<double>::quiet_NaN());
        }
      }
      w.seal();
      w.run_forward();
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      EXPECT_EQ(read(w.forward.lse), want_lse);
      for (const double x : read(w.forward.out)) ASSERT_FALSE(std::isnan(x));
    }
  }
}

// Each token the child of the one before: what `causal` shows. On the CPU the bits are the same; a
// GPU cuts the keys elsewhere.
TEST_P(TreeMask, ChainIsCausal) {
  for (const DType dtype : kDtypes) {
    for (const bool seqused : {false, true}) {
      for (Case c : drafts(dtype)) {
        SCOPED_TRACE(c.name());
        c.seqused = seqused;
        Workload tree(c, 5);
        c.tree = Tree::kNone;
        c.mask = causal();
        Workload chain(c, 5);
        tree.options.engine = chain.options.engine = engine();
        for (int64_t i = 0; i < c.batch * c.sq; ++i) {
          words(tree)[i] = ~uint64_t{0} >> (63 - i % c.sq);
        }
        tree.seal();
        if (!computes([&] { tree.run_forward(); })) continue;
        EXPECT_TRUE(forward_is_right(tree, expect_forward(chain)));
        if (engine() == "cuda") continue;
        chain.run_forward();
        EXPECT_EQ(bits(tree.forward.out), bits(chain.forward.out));
        EXPECT_EQ(bits(tree.forward.lse), bits(chain.forward.lse));
      }
    }
  }
}

// Words of no bits leave the earlier keys; where there are none, a row is 0 and its LSE -inf.
TEST_P(TreeMask, WordsOfNoBits) {
  for (const DType dtype : kDtypes) {
    for (const int64_t sk : {64, 70, 20}) {
      Case c{.dtype = dtype, .batch = 2, .sq = 64, .sk = sk, .d = 16, .dv = 16};
      c.tree = Tree::kAncestors;
      SCOPED_TRACE(c.name());
      Workload w(c, 6);
      w.options.engine = engine();
      std::memset(words(w), 0, 8 * static_cast<size_t>(c.batch * c.sq));
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t j = std::max<int64_t>(0, sk - c.sq); j < sk; ++j) {
          fill_row(w.forward.v, b * sk + j, std::numeric_limits<double>::quiet_NaN());
        }
      }
      w.seal();
      if (!computes([&] { w.run_forward(); })) continue;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      for (const double lse : read(w.forward.lse)) EXPECT_EQ(std::isinf(lse), sk <= c.sq);
    }
  }
}

// A plan has no words of its own.
TEST_P(TreeMask, WordsChangeBetweenRunsOfAPlan) {
  for (const CacheShape shape :
       {CacheShape{Order::kNhd, Index::kTable, 16}, CacheShape{Order::kHnd, Index::kLists, 3, true},
        CacheShape{Order::kNhd, Index::kBatch, 0}}) {
    for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
      const Case c{.dtype = DType::kBF16,
                   .batch = 3,
                   .sq = 20,
                   .sk = 300,
                   .hq = 8,
                   .hk = 2,
                   .mask = window(280, -1),
                   .layout = layout,
                   .tree = Tree::kAncestors};
      SCOPED_TRACE(c.name() + " " + shape.name());
      Workload w(c, 7);
      w.options.engine = engine();
      Cached cached(w, shape, 8);
      EngineMemory memory(engine());
      const ForwardTensors there = memory.at(cached.forward);
      std::optional<Plan> plan;
      if (!computes([&] {
            plan.emplace(fulgur::plan(there, memory.options(cached.forward, w.options)));
          })) {
        continue;
      }
      const Details details = plan->details();
      const auto& tensors = details.get<Details::Texts>("call.optional_tensors");
      EXPECT_NE(std::ranges::find(tensors, "tree_mask"), tensors.end());
      for (int turn = 0; turn < 3; ++turn) {
        for (int64_t i = 0; i < w.forward.tree_mask.numel(); ++i) {
          words(w)[i] = words(w)[i] * 3 + static_cast<uint64_t>(turn);
        }
        w.seal();
        memory.send();
        plan->run(there, w.run_options);
        memory.bring_back();
        EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
        EXPECT_TRUE(w.check_memory());
      }
    }
  }
}

// `invariant` calls: the bits of a sequence are those of any cache, of a batch of its own, and of
// one thread.
TEST_P(TreeMask, InvariantCalls) {
  for (const DType dtype : kDtypes) {
    for (const int64_t sq : {5, 40}) {
      Case c{.dtype = dtype,
             .batch = 3,
             .sq = sq,
             .sk = 700,
             .hq = 4,
             .hk = 1,
             .d = 40,
             .dv = 24,
             .seqused = true,
             .tree = Tree::kAncestors};
      SCOPED_TRACE(c.name());
      Workload w(c, 9);
      w.options.engine = engine();
      w.options.invariant = true;
      if (!computes([&] { w.run_forward(); })) continue;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      const auto out = bits(w.forward.out), lse = bits(w.forward.lse);
      for (const CacheShape shape : {CacheShape{Order::kNhd, Index::kTable, 16, true},
                                     CacheShape{Order::kNhd, Index::kLists, 1}}) {
        SCOPED_TRACE(shape.name());
        w.seal();
        w.options.threads = 1;
        Cached cached(w, shape, 10);
        cached.run_forward();
        EXPECT_EQ(bits(w.forward.out), out);
        EXPECT_EQ(bits(w.forward.lse), lse);
        const auto paged = bits(w.forward.out);
        ForwardTensors alone = cached.forward;
        const auto at = [&](Tensor& t, int64_t b) {
          t.data = static_cast<std::byte*>(t.data) + b * t.strides[0] * size_of(t.dtype);
          t.shape[0] = 1;
        };
        if (alone.page_indptr.given()) continue;
        for (Tensor* t : {&alone.q, &alone.out, &alone.lse, &alone.tree_mask, &alone.seqused_k,
                          &alone.leftpad_k, &alone.page_table}) {
          if (t->given()) at(*t, 1);
        }
        compute(alone, w.options, w.run_options);
        EXPECT_EQ(bits(w.forward.out), paged);
      }
    }
  }
}

// The longest sequence counts, not all packed rows.
TEST_P(TreeMask, AtMost64Queries) {
  Case c{.dtype = DType::kBF16, .batch = 1, .sq = 65, .sk = 80, .tree = Tree::kRandom};
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    c.layout = layout;
    c.sq = 65;
    Workload w(c, 11);
    w.options.engine = engine();
    EXPECT_EQ(message_of([&] { w.run_forward(); }),
              "tree_mask: given for sequences of 65 queries, want at most 64");
    EXPECT_TRUE(w.nothing_written());
    c.sq = 64;
    Workload fits(c, 11);
    fits.options.engine = engine();
    if (!computes([&] { fits.run_forward(); })) continue;
    EXPECT_TRUE(forward_is_right(fits, expect_forward(fits)));
  }
}

FULGUR_EVERY_ENGINE(TreeMask);

}  // namespace
}  // namespace fulgur::test
