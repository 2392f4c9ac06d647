// What the host decides for the decode kernel, and the formulas by which its CTAs share
// out the keys.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "cuda/decode/candidates.h"
#include "cuda/decode/decode.h"
#include "cuda/decode/family.h"
#include "cuda/decode/rejects.h"
#include "cuda/device/launch_memory.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/reachable.h"
#include "cuda/sm90/forward_rejects.h"
#include "forward_call.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda {
namespace {

using namespace decode;
using namespace sm90;

using kernels::ChunkRange;
using kernels::Slices;
using test::forward_problem;
using test::ForwardShape;

TEST(Slices, DivideTheChunks) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int chunks = static_cast<int>(random() % (1u << random() % 20));
    const int ctas = 1 + static_cast<int>(random() % 300);
    const Slices slices = kernels::slices_of(chunks, ctas);
    EXPECT_EQ(slices.count, std::min(chunks, ctas));
    int end = 0;
    for (int slice = 0; slice < slices.count; ++slice) {
      ASSERT_EQ(kernels::slice_begin(slices, slice), end);
      end = kernels::slice_begin(slices, slice + 1);
      const int size = end - kernels::slice_begin(slices, slice);
      ASSERT_GE(size, 1);
      ASSERT_LE(size, chunks / slices.count + 1);
      ASSERT_EQ(kernels::slice_of_chunk(slices, end - size), slice);
      ASSERT_EQ(kernels::slice_of_chunk(slices, end - 1), slice);
    }
    ASSERT_EQ(end, chunks);
  }
}

// Every chunk of every q block is in one slice; the slices of a q block follow each other; a q
// block without keys has one slice, too.
TEST(Slices, EveryChunkOfAQBlockHasOne) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    std::vector<int> q_blocks;
    int chunks = 0;
    for (int i = 1 + static_cast<int>(random() % 40); i > 0; --i) {
      q_blocks.push_back(random() % 4 == 0 ? 0 : static_cast<int>(random() % 90));
      chunks += kernels::kTileOverhead + q_blocks.back();
    }
    const Slices slices = kernels::slices_of(chunks, 1 + static_cast<int>(random() % 140));
    int at = 0;
    for (const int count : q_blocks) {
      int next = 0;
      std::vector<int> takers;
      for (int slice = 0; slice < slices.count; ++slice) {
        const ChunkRange mine =
            kernels::chunks_in_slice(at, count, kernels::slice_begin(slices, slice),
                                     kernels::slice_begin(slices, slice + 1));
        if (!mine.any()) continue;
        ASSERT_EQ(mine.begin, next);
        next = mine.end;
        takers.push_back(slice);
      }
      ASSERT_EQ(next, count);
      ASSERT_FALSE(takers.empty());
      ASSERT_EQ(takers.back() - takers.front() + 1, static_cast<int>(takers.size()));
      if (count == 0) {
        ASSERT_EQ(takers.size(), 1u);
      } else {
        const int first = at + kernels::kTileOverhead;
        ASSERT_EQ(kernels::slice_of_chunk(slices, first), takers.front());
        ASSERT_EQ(kernels::slice_of_chunk(slices, first + count - 1), takers.back());
      }
      at += kernels::kTileOverhead + count;
    }
  }
}

// Every split of every q block is in one slice, and its chunks are those that no other split has.
TEST(Slices, EverySplitOfAQBlockHasOne) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<int> q_blocks;
    int chunks = 0;
    for (int i = 1 + static_cast<int>(random() % 20); i > 0; --i) {
      q_blocks.push_back(static_cast<int>(random() % (1u << random() % 13)));
      chunks += kernels::kTileOverhead + q_blocks.back();
    }
    const Slices slices = kernels::slices_of(chunks, 1 + static_cast<int>(random() % 140));
    int at = 0;
    for (const int count : q_blocks) {
      const kernels::Splits splits = kernels::invariant_splits(count);
      ASSERT_GE(splits.count, 1);
      ASSERT_LE(splits.count, kernels::max_splits(count));
      ASSERT_LT((splits.count - 1) * splits.chunks, std::max(count, 1));  // none is empty
      ASSERT_GE(splits.count * splits.chunks, count);
      ASSERT_LE(kernels::max_splits(count), kernels::max_splits(count + 1));
      int next = 0;
      for (int slice = 0; slice < slices.count; ++slice) {
        const int end = kernels::slice_begin(slices, slice + 1);
        int split = kernels::first_split(at, splits, kernels::slice_begin(slices, slice));
        for (; split < splits.count && kernels::split_begin(at, splits, split) < end; ++split)
          ASSERT_EQ(split, next++);
      }
      ASSERT_EQ(next, splits.count);
      at += kernels::kTileOverhead + count;
    }
  }
}

DecodePlan plan_of(const test::ForwardShape& shape) {
  return decode_candidate(forward_problem(shape), {}).plan;
}

TEST(DecodePlan, FitsTheMachine) {
  for (const int64_t d : {8, 64, 80, 128, 192, 256}) {
    for (const int64_t dv : {8, 64, 128, 256}) {
      for (const int64_t hq : {1, 4, 8, 16, 71}) {
        for (const int64_t sq : {1, 2, 4, 16, 300}) {
          const DecodePlan plan = plan_of({.sq = sq, .hq = hq, .hk = 1, .d = d, .dv = dv});
          SCOPED_TRACE(fmt::format("{} {} {} {}", d, dv, hq, sq));
          EXPECT_LE(plan.shared_bytes * plan.residents, Card{}.shared_bytes);
          EXPECT_LE(plan.threads(), plan.warps_per_group >= 4 ? 384 : 256);
          EXPECT_GE(plan.tile_rows, std::min<int64_t>(sq * hq, plan.block_rows()));
          EXPECT_LE(plan.tile_rows, plan.block_rows());
          EXPECT_EQ(kernels::chunk_keys(plan.block_keys) % plan.block_keys, 0);
          EXPECT_GE(std::min(plan.k_stages, plan.v_stages), 2);
          EXPECT_LE(plan.counters() * 4, LaunchMemory::kZeroed);
        }
      }
    }
  }
}

// With many keys a CTA reads up to eight heads together, if these lie side by side with their
// scales and a row of one head is not a whole number of lines of memory.
TEST(DecodePlan, HeadsOfCodesComeTogether) {
  struct Call {
    DType codes = DType::kInt4;
    int64_t hk = 8, d = 128, sk = 8192, page = 0, queries = 1;
    bool apart = false;  // the scales of a head lie together
    bool zero_points = false;
  };
  const auto heads = [](const Call& c) {
    constexpr int64_t kBatch = 64, kGroup = 4;
    test::ForwardCall call = test::forward_call({.batch = kBatch,
                                                 .sq = c.queries,
                                                 .sk = c.sk,
                                                 .hq = kGroup * c.hk,
                                                 .hk = c.hk,
                                                 .d = c.d,
                                                 .seqused = true});
    const int64_t rows = c.page > 0 ? c.page : c.sk, entries = kBatch * c.sk / rows;
    for (ConstTensor* t : {&call.args.k, &call.args.v})
      *t = Tensor::contiguous(nullptr, c.codes, {entries, rows, c.hk, c.d}, t->device);
    static const float scale = 1;
    if (c.codes == DType::kInt4) {
      ConstTensor scales = Tensor::contiguous(const_cast<float*>(&scale), DType::kF16,
                                              {entries, rows, c.hk, c.d / 32}, call.args.q.device);
      if (c.apart) std::swap(scales.strides[1], scales.strides[2]);
      if (c.apart) scales.strides[2] = rows * c.d / 32, scales.strides[1] = c.d / 32;
      call.args.descales.k_descale = call.args.descales.v_descale = scales;
      if (c.zero_points) call.args.descales.k_zero_point = call.args.descales.v_zero_point = scales;
    }
    if (c.page > 0)
      call.args.cache.page_table =
          Tensor::contiguous(nullptr, DType::kI32, {kBatch, c.sk / rows}, call.args.q.device);
    std::set<int> all;
    for (const DecodePlan& plan : decode_plans(make_problem(call.args, call.options), Card{})) {
      EXPECT_LE(plan.shared_bytes, Card{}.shared_bytes);
      EXPECT_TRUE(plan.heads == 1 || (plan.box_keys > 0 && plan.k_stages % plan.warp_groups == 0));
      EXPECT_EQ(plan.threads() % 128, 0);
      all.insert(plan.heads);
    }
    EXPECT_EQ(all.size(), 1u);
    return *all.begin();
  };
  EXPECT_EQ(heads({}), 8);
  EXPECT_EQ(heads({.hk = 4}), 4);
  EXPECT_EQ(heads({.hk = 12}), 4);
  EXPECT_EQ(heads({.hk = 6}), 1);
  EXPECT_EQ(heads({.hk = 3}), 1);
  EXPECT_EQ(heads({.sk = 1024}), 1);
  EXPECT_EQ(heads({.page = 64}), 8);
  EXPECT_EQ(heads({.page = 16}), 1);
  EXPECT_EQ(heads({.zero_points = true}), 8);
  EXPECT_EQ(heads({.page = 64, .zero_points = true}), 1);
  EXPECT_EQ(heads({.codes = DType::kQ8_0, .page = 16}), 8);
  EXPECT_EQ(heads({.codes = DType::kQ8_0, .page = 4}), 1);
  EXPECT_EQ(heads({.queries = 4}), 8);
  EXPECT_EQ(heads({.queries = 5}), 1);
  EXPECT_EQ(heads({.apart = true}), 1);
  for (const int64_t d : {64, 128, 256}) {
    SCOPED_TRACE(d);
    EXPECT_EQ(heads({.codes = DType::kQ8_0, .d = d}), d == 256 ? 1 : 8);
    EXPECT_EQ(heads({.codes = DType::kQ4_0, .d = d}), 8);
    EXPECT_EQ(heads({.codes = DType::kInt8, .d = d}), 1);
  }
}

// TMA loads codes in boxes of the keys of a tile or of a page. It loads formats of blocks, too,
// where all rows of a kv head begin at the same distance after a multiple of 16 bytes. Others are
// copied by cp.async.
TEST(DecodePlan, CodesComeInBoxes) {
  const auto boxed = [](DType codes, int64_t d, int64_t hk, int64_t page = 0, int64_t sq = 1) {
    test::ForwardCall call =
        test::forward_call({.sq = sq, .sk = 8192, .hq = 4 * hk, .hk = hk, .d = d, .seqused = true});
    const int64_t rows = page > 0 ? page : 8192;
    for (ConstTensor* t : {&call.args.k, &call.args.v})
      *t = Tensor::contiguous(nullptr, codes, {2 * 8192 / rows, rows, hk, d}, t->device);
    if (page > 0)
      call.args.cache.page_table =
          Tensor::contiguous(nullptr, DType::kI32, {2, 8192 / rows}, call.args.q.device);
    std::set<int> keys;
    for (const DecodePlan& plan : decode_plans(make_problem(call.args, call.options), Card{})) {
      EXPECT_LE(plan.shared_bytes * plan.residents, Card{}.shared_bytes);
      EXPECT_GE(plan.k_stages, 2);
      keys.insert(plan.box_keys);
    }
    EXPECT_EQ(keys.size(), 1u);
    return *keys.begin();
  };
  for (const DType codes : {DType::kE4M3, DType::kInt8, DType::kInt4, DType::kQ8_0, DType::kQ4_0}) {
    for (const int64_t d : {64, 128, 256}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(codes), d));
      const bool lanes = codes == DType::kQ8_0 && d == 64;
      EXPECT_GE(boxed(codes, d, 8), lanes ? 0 : 32);
      EXPECT_EQ(boxed(codes, d, 8, 16), lanes ? 0 : 16);
      EXPECT_EQ(boxed(codes, d, 8, 4), 0);
      EXPECT_EQ(boxed(codes, d, 8, 0, 8), 64);
      EXPECT_EQ(boxed(codes, d, 8, 16, 8), 16);
    }
  }
  // A row of one head has 136 bytes. The seventh block of 192 columns may begin too far after it.
  EXPECT_EQ(boxed(DType::kQ8_0, 128, 1), 0);
  EXPECT_EQ(boxed(DType::kQ8_0, 192, 8), 0);
  EXPECT_EQ(boxed(DType::kInt8, 128, 1), boxed(DType::kInt8, 128, 8));
}

// With more rows than a warp has, warpgroups convert codes themselves, up to 32 rows, or other
// warps do for them, more of them where that takes long. Caches of codes and floats stay on the
// warp path, and so do few rows of more than 128 columns, no multiple of 64, if that converts fast.
TEST(DecodePlan, CodesOfManyRowsAreConverted) {
  const auto plan_of_codes = [](DType codes_k, DType codes_v, int64_t d, int64_t sq) {
    test::ForwardCall call =
        test::forward_call({.batch = 4, .sq = sq, .sk = 8192, .hq = 8, .hk = 2, .d = d});
    call.args.k = Tensor::contiguous(nullptr, codes_k, {4, 8192, 2, d}, call.args.q.device);
    call.args.v = Tensor::contiguous(nullptr, codes_v, {4, 8192, 2, d}, call.args.q.device);
    std::set<std::tuple<bool, int, int, int>> tiles;
    for (const DecodePlan& plan : decode_plans(make_problem(call.args, call.options), Card{})) {
      EXPECT_LE(plan.shared_bytes, Card{}.shared_bytes);
      EXPECT_EQ(plan.code_stages >= 2, plan.convert_warps > 0);
      tiles.insert({plan.warpgroup_path(), plan.block_rows(), plan.block_keys, plan.convert_warps});
    }
    EXPECT_EQ(tiles.size(), 1u);
    return *tiles.begin();
  };
  using Tile = std::tuple<bool, int, int, int>;
  const auto of = [&](DType codes, int64_t d, int64_t sq) {
    return plan_of_codes(codes, codes, d, sq);
  };
  EXPECT_FALSE(std::get<0>(of(DType::kE4M3, 128, 4)));
  EXPECT_EQ(of(DType::kE4M3, 128, 5), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kInt8, 128, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kInt4, 256, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kE4M3, 128, 16), (Tile{true, 64, 64, 4}));
  EXPECT_EQ(of(DType::kInt8, 128, 16), (Tile{true, 64, 64, 8}));
  EXPECT_EQ(of(DType::kQ8_0, 64, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kQ8_0, 128, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kQ8_0, 256, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kQ8_0, 128, 16), (Tile{true, 64, 64, 8}));
  EXPECT_EQ(of(DType::kQ8_0, 64, 16), (Tile{true, 64, 128, 8}));
  EXPECT_EQ(of(DType::kE4M3, 128, 32), (Tile{true, 128, 128, 4}));
  EXPECT_EQ(of(DType::kQ8_0, 128, 32), (Tile{true, 128, 64, 4}));  // registers
  EXPECT_EQ(of(DType::kQ8_0, 64, 32), (Tile{true, 128, 128, 4}));
  EXPECT_EQ(of(DType::kE4M3, 256, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kInt8, 256, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kE4M3, 192, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kE4M3, 160, 8), (Tile{false, 32, 32, 0}));
  EXPECT_EQ(of(DType::kE4M3, 256, 32), (Tile{true, 64, 32, 4}));
  EXPECT_EQ(of(DType::kQ4_0, 256, 8), (Tile{true, 64, 64, 0}));
  EXPECT_EQ(of(DType::kQ4_0, 256, 16), (Tile{true, 64, 64, 8}));
  EXPECT_EQ(of(DType::kQ8_0, 256, 16), (Tile{true, 64, 32, 8}));  // shared memory
  EXPECT_FALSE(std::get<0>(plan_of_codes(DType::kE4M3, DType::kBF16, 128, 16)));
}

// Shared memory has room for enough stages of tiles of many rows to keep loads of K and V in
// flight.
TEST(DecodePlan, ManyRowsHaveSixBuffers) {
  const auto buffers = [](int64_t d) {
    const DecodePlan plan = plan_of({.sq = 16, .hq = 8, .hk = 1, .d = d, .dv = d});
    EXPECT_EQ(plan.block_rows(), 128);
    return std::pair{plan.block_keys, plan.k_stages + plan.v_stages};
  };
  EXPECT_EQ(buffers(128), (std::pair{128, 6}));
  EXPECT_EQ(buffers(192), (std::pair{64, 7}));
  EXPECT_EQ(buffers(256), (std::pair{48, 6}));
}

/// Problems of every kind that a plan depends on.
std::vector<Problem> many_problems() {
  std::vector<Problem> all;
  for (const auto& [hq, hk] : {std::pair{8, 1}, {32, 8}, {4, 4}}) {
    for (const int64_t batch : {1, 3, 17, 33, 64, 65, 200, 300}) {
      for (const int64_t sq : {1, 2, 4, 16, 40}) {
        for (const int64_t sk : {1, 64, 100, 1024, 8192, 70000}) {
          for (const int64_t page : {0, 16}) {
            Problem p = forward_problem(
                {.batch = batch, .sq = sq, .sk = sk, .hq = hq, .hk = hk, .seqused = sq != 2});
            if (page > 0) {
              p.cache.pages = Problem::Cache::Pages::kTable;
              p.cache.page = page;
            }
            all.push_back(p);
          }
        }
      }
    }
  }
  return all;
}

TEST(DecodePlan, IsTheCheapestCandidate) {
  for (const Problem& p : many_problems()) {
    const std::vector<DecodePlan> plans = decode_plans(p, {});
    const Fitting<DecodePlan> chosen = decode_candidate(p, {});
    EXPECT_NE(std::ranges::find(plans, chosen.plan), plans.end());
    for (const DecodePlan& plan : plans) {
      EXPECT_GT(plan.cycles, 0);
      EXPECT_GE(plan.expected_cycles, chosen.plan.expected_cycles);
    }
  }
}

// No candidate reads keys twice where another one reads them once, and none is there twice.
TEST(DecodePlan, CandidatesHaveAllRowsOfAKvHead) {
  for (const Problem& p : many_problems()) {
    std::set<std::string> kernels;
    for (const DecodePlan& plan : decode_plans(p, {})) {
      EXPECT_GE(plan.block_rows(), std::min<int64_t>(p.sq * p.group(), 128));
      EXPECT_TRUE(kernels.insert(kernel_config(plan)).second);
    }
  }
}

/// The schedules that a problem's candidates have, those of the warpgroup path alone or all.
std::set<DecodeSchedule> schedules_of(const Problem& p, bool warpgroups = false) {
  std::set<DecodeSchedule> schedules;
  for (const DecodePlan& plan : decode_plans(p, {}))
    if (!warpgroups || plan.warpgroup_path()) schedules.insert(plan.schedule);
  return schedules;
}

TEST(DecodePlan, CandidatesHaveTheSchedulesThatCanComputeThem) {
  using enum DecodeSchedule;
  using Set = std::set<DecodeSchedule>;
  const auto of = [](const ForwardShape& shape) { return schedules_of(forward_problem(shape)); };
  const ForwardShape one{.batch = 1, .sq = 1, .sk = 8192, .hq = 32, .hk = 8};
  EXPECT_EQ(of(one), (Set{kStreamK, kStreamKOrRoundRobin, kSplitToFill}));
  ForwardShape shape = one;
  shape.sq = 64;  // two blocks of rows
  EXPECT_EQ(of(shape), (Set{kStreamK}));
  shape = one;
  shape.sk = 64;  // nothing to split
  EXPECT_FALSE(of(shape).contains(kSplitToFill));
  shape = one;
  shape.batch = 17;  // more q blocks than CTAs
  EXPECT_EQ(of(shape), (Set{kStreamK, kStreamKOrRoundRobin, kDynamic}));
  shape.hq = shape.hk = 1;
  EXPECT_TRUE(of(shape).contains(kSplitToFill));
  shape.batch = kernels::kFillSequences + 1;
  EXPECT_FALSE(of(shape).contains(kSplitToFill));
  shape.batch = kernels::kDynamicSequences;
  EXPECT_TRUE(of(shape).contains(kDynamic));
  ++shape.batch;
  EXPECT_FALSE(of(shape).contains(kDynamic));
  shape = one;
  shape.invariant = true;
  EXPECT_EQ(of(shape), (Set{kInvariantSplits}));
  Problem groups = forward_problem(one);
  groups.of_groups = true;
  EXPECT_EQ(schedules_of(groups), (Set{kStreamK, kSplitToFill}));
  // The warp path has no registers for whole q blocks with a tree mask.
  Problem tree = forward_problem(one);
  tree.given.set(Arg::kTreeMask, true);
  for (const DecodePlan& plan : decode_plans(tree, {}))
    EXPECT_TRUE(plan.warpgroup_path() || plan.schedule == kStreamK ||
                plan.schedule == kSplitToFill);
  EXPECT_TRUE(schedules_of(tree, true).contains(kStreamKOrRoundRobin));
}

// A lane of a warp knows one sequence or two.
TEST(DecodePlan, LanesKnowAllSequences) {
  for (const int64_t batch : {1, 32, 33, 64}) {
    for (const DecodePlan& plan : decode_plans(
             forward_problem({.batch = batch, .sq = 16, .sk = 8192, .hq = 4, .hk = 1}), {})) {
      if (plan.schedule != DecodeSchedule::kSplitToFill) continue;
      EXPECT_EQ(plan.lane_sequences, batch > 32 ? 2 : 1);
    }
  }
}

// The cost is that of what a call does.
TEST(DecodePlan, MoreWorkCostsMore) {
  const auto cycles = [](const ForwardShape& shape) {
    return decode_candidate(forward_problem(shape), {}).cycles;
  };
  ForwardShape shape{.batch = 8, .sq = 1, .sk = 8192, .hq = 32, .hk = 8};
  const double of_one = cycles(shape);
  shape.sk = 16384;
  EXPECT_GT(cycles(shape), 1.5 * of_one);
  EXPECT_LT(cycles(shape), 2 * of_one);
  shape = {.batch = 16, .sq = 1, .sk = 8192, .hq = 32, .hk = 8};
  EXPECT_GT(cycles(shape), 1.5 * of_one);
  shape = {.batch = 8, .sq = 16, .sk = 8192, .hq = 32, .hk = 8};
  EXPECT_GT(cycles(shape), of_one);
}

// One sequence goes to all SMs, equal q blocks for all of them stay whole, and those of unequal
// lengths are balanced when the call runs.
TEST(DecodePlan, SchedulesGoWhereTheyBelong) {
  const auto schedule = [](int64_t batch, int64_t sq, int64_t sk, bool unequal = false) {
    return decode_candidate(
               forward_problem(
                   {.batch = batch, .sq = sq, .sk = sk, .hq = 32, .hk = 8, .seqused = unequal}),
               {})
        .plan.schedule;
  };
  for (const int64_t sq : {1, 4, 16}) {
    EXPECT_EQ(schedule(1, sq, 8192), DecodeSchedule::kSplitToFill);
    EXPECT_EQ(schedule(1, sq, 131072), DecodeSchedule::kSplitToFill);
    EXPECT_EQ(schedule(33, sq, 512), DecodeSchedule::kStreamKOrRoundRobin);  // 264 q blocks
  }
  EXPECT_EQ(schedule(24, 16, 8192, true), DecodeSchedule::kDynamic);
}

// Prewarming compiles every kernel that a call may have.
TEST(DecodePlan, EveryKernelThatIsChosenIsReachable) {
  const auto name = [](const KernelUse& use) {
    return use.request.source + use.request.kernel_config;
  };
  for (const auto& [hq, hk] : {std::pair{8, 1}, {32, 8}}) {
    Problem p = forward_problem({.sq = 1, .hq = hq, .hk = hk, .mask = causal(), .seqused = true});
    p.cache.pages = Problem::Cache::Pages::kTable;
    p.cache.page = 64;
    std::set<std::string> reachable;
    for_reachable(p, Target{}, [&](const Candidates& candidates) {
      for (const auto& candidate : candidates)
        for (const KernelUse& use : candidate->kernels()) reachable.insert(name(use));
    });
    std::mt19937 random(1);
    for (int i = 0; i < 2000; ++i) {
      p.batch = 1 + static_cast<int64_t>(random() % (1u << random() % 10));
      p.sq = 1 + static_cast<int64_t>(random() % (1u << random() % 5));
      p.sk = 1 + static_cast<int64_t>(random() % (1u << random() % 17));
      if (p.sq * p.group() > 128) continue;
      for (const KernelUse& use : decode_kernels(decode_candidate(p, {}).plan))
        EXPECT_TRUE(reachable.contains(name(use)))
            << p.batch << " x " << p.sq << " x " << p.sk << " " << use.request.kernel_config;
    }
  }
}

// Whatever the lengths, cut q blocks have no more splits than there is room for: two for each
// thread block; no q block that goes whole is longer than an eighth more than what each has, and
// three chunks; and no split is shorter than the least.
TEST(Slices, DynamicSplitsHaveRoom) {
  constexpr int kMin = 4;
  std::mt19937 random(1);
  const auto upto = [&](int from, int to) {
    return std::uniform_int_distribution(from, to)(random);
  };
  for (int run = 0; run < 2000; ++run) {
    const int ctas = upto(1, 264);
    std::vector<int> chunks(upto(1, 2000));
    const int longest = 1 << upto(2, 14);
    for (int& x : chunks) x = upto(kMin, longest);
    if (run % 2 == 0) chunks[0] *= 20;
    int all = 0;
    for (const int x : chunks) all += x + kernels::kTileOverhead;
    const int most = kernels::dynamic_max_chunks(all, ctas, 2 * kMin);
    int cut = 0;
    for (const int x : chunks) {
      const int splits = kernels::dynamic_splits(x, most);
      if (splits > 1) {
        cut += splits;
        EXPECT_GE(x / splits, kMin);
      } else if (x > 3 * kMin) {
        EXPECT_LE(8.0 * x, 9.0 * all / ctas + 24) << ctas;
      }
    }
    EXPECT_LE(cut, 2 * ctas) << chunks.size() << " q blocks of up to " << longest;
  }
}

// 160 q blocks for 132 CTAs: the last 28, of four sequences, are cut in four; 192 are not.
TEST(Slices, ALastRoundOfFewQBlocksIsSplit) {
  using kernels::last_round_sequences;
  using kernels::last_round_splits;
  EXPECT_EQ(last_round_sequences(20, 8, 132), 4);
  EXPECT_EQ(last_round_sequences(24, 8, 132), 8);
  EXPECT_EQ(last_round_sequences(25, 8, 132), 0);  // 68 are half of them
  EXPECT_EQ(last_round_sequences(16, 8, 132), 0);  // there is one round
  EXPECT_EQ(last_round_sequences(33, 8, 132), 0);  // two whole ones
  EXPECT_EQ(last_round_sequences(34, 8, 132), 1);
  EXPECT_EQ(last_round_splits(64, 59, 4, 32, 132), 4);
  EXPECT_EQ(last_round_splits(64, 59, 20, 32, 132), 3);  // of 20 chunks or more
  EXPECT_EQ(last_round_splits(64, 48, 4, 8, 132), kernels::kFewSplits);
  EXPECT_EQ(last_round_splits(8, 59, 4, 8, 132), 1);
  EXPECT_EQ(last_round_splits(64, 59, 4, 200, 132), 1);
  std::mt19937 random(1);
  const auto upto = [&](int to) { return std::uniform_int_distribution(1, to)(random); };
  for (int run = 0; run < 2000; ++run) {
    const int ctas = upto(264), heads = upto(64), sequences = upto(256);
    const int q_blocks = last_round_sequences(sequences, heads, ctas) * heads;
    if (q_blocks == 0) continue;
    const int splits = q_blocks * last_round_splits(1 << 20, 1 << upto(20), 4, q_blocks, ctas);
    EXPECT_LE(splits, std::max(2 * ctas, q_blocks)) << ctas << " " << heads << " " << sequences;
  }
}

TEST(Slices, RoundRobinIsTakenWhereItIsEven) {
  using kernels::round_robin_is_even;
  EXPECT_TRUE(round_robin_is_even(132, 129, 132 * 129, 132));
  EXPECT_TRUE(round_robin_is_even(512, 129, 512 * 129, 132));   // 3.88 rounds
  EXPECT_FALSE(round_robin_is_even(136, 129, 136 * 129, 132));  // 1.03 rounds
  EXPECT_FALSE(round_robin_is_even(200, 129, 200 * 129, 132));
  EXPECT_FALSE(round_robin_is_even(512, 2049, 504 * 17 + 8 * 2049, 132));  // one long sequence
  EXPECT_TRUE(round_robin_is_even(512, 131, 512 * 129, 132));
  EXPECT_FALSE(round_robin_is_even(132, 1 << 26, 1 << 30, 132));  // beyond 32 bits
  EXPECT_TRUE(round_robin_is_even(132, 0, 0, 132));
}

/// The family that the model chooses.
std::string chosen(const test::ForwardShape& shape) {
  Reasons reasons;
  return ranked(forward_problem(shape), architecture_of({}).families, {}, {}, &reasons)
      .at(0)
      ->tile.family;
}

TEST(DecodePlan, IsChosenWhereMemoryBinds) {
  for (const auto& [hq, hk] : {std::pair{32, 8}, {64, 8}, {8, 1}, {32, 32}, {28, 4}}) {
    for (const int64_t batch : {1, 8, 64}) {
      for (const int64_t sk : {8192, 65536}) {
        EXPECT_EQ(chosen({.batch = batch, .sq = 1, .sk = sk, .hq = hq, .hk = hk}), "sm90_decode")
            << batch << " " << sk << " " << hq << "/" << hk;
      }
    }
  }
  EXPECT_EQ(chosen({.batch = 8, .sq = 16, .sk = 8192, .hq = 64, .hk = 8}), "sm90_decode");
  EXPECT_EQ(chosen({.batch = 8, .sq = 512, .sk = 8192, .hq = 64, .hk = 8}), "sm90_forward");
  EXPECT_EQ(chosen({.batch = 8, .sq = 1024, .sk = 1024, .hq = 8, .hk = 8}), "sm90_forward");
}

TEST(DecodePlan, OfInvariantCallsDependsOnNoLength) {
  for (const DType keys : {DType::kBF16, DType::kInt8, DType::kQ4_0}) {
    const auto plan = [&](int64_t batch, int64_t sq) {
      Problem p = forward_problem({.batch = batch, .sq = sq, .hq = 8, .hk = 2, .invariant = true});
      p.dtypes.k = p.dtypes.v = keys;
      p.given.set(Arg::kCacheBatchIdx, true);
      DecodePlan made = decode_candidate(p, {}).plan;
      EXPECT_EQ(made.schedule, DecodeSchedule::kInvariantSplits);
      return kernel_config(made);
    };
    EXPECT_EQ(plan(1, 1), plan(64, 1));
    EXPECT_EQ(plan(1, 1), plan(3, 100));
  }
}

/// The sources of the kernels that an invariant call of contiguous keys launches for its sequences,
/// and how many queries of one are few.
std::pair<std::set<std::string>, int> by_rows(const test::ForwardShape& shape) {
  const Problem p = forward_problem(shape);
  Reasons reasons;
  std::set<std::string> sources;
  for (const KernelUse& use :
       ranked(p, architecture_of({}).families, {}, {}, &reasons)[0]->kernels())
    if (!use.request.source.starts_with("common/")) sources.insert(use.request.source);
  return {sources, decode_candidate(p, {}).plan.few_queries};
}

// A sequence's own rows decide: by the shape where all have as many, on the device where some may
// have fewer.
TEST(DecodePlan, RowsOfASequenceDecideForInvariantCalls) {
  using Kernels = std::pair<std::set<std::string>, int>;
  const Kernels decode = {{"decode/decode_warpgroup.cu", "decode/combine.cu"}, 0};
  const Kernels forward = {{"sm90/forward/forward.cu"}, 0};
  const auto both = [](int few) {
    return Kernels{{"decode/decode_warpgroup.cu", "decode/combine.cu", "sm90/forward/forward.cu"},
                   few};
  };
  for (const int64_t batch : {1, 64}) {
    for (const int64_t sk : {8, 100000}) {
      test::ForwardShape s{.batch = batch, .sk = sk, .hq = 8, .hk = 2, .invariant = true};
      for (const auto& [packed, seqused_q] :
           {std::pair{false, false}, {true, false}, {false, true}}) {
        s.packed = packed;
        s.seqused_q = seqused_q;
        const bool alike = !packed && !seqused_q;
        s.sq = 1;
        EXPECT_EQ(by_rows(s), decode);
        s.sq = 16;
        EXPECT_EQ(by_rows(s), decode);
        s.sq = 17;
        EXPECT_EQ(by_rows(s), alike ? forward : both(16));
        s.sq = 3000;
        EXPECT_EQ(by_rows(s), alike ? forward : both(16));
      }
    }
  }
  // Where a query alone has more rows none are few; dropout is the forward kernel's.
  EXPECT_EQ(by_rows({.sq = 1, .hq = 71, .hk = 1, .packed = true, .invariant = true}), forward);
  EXPECT_EQ(by_rows({.sq = 1, .packed = true, .invariant = true, .dropout = 0.1}), forward);
  EXPECT_EQ(by_rows({.sq = 64, .hq = 2, .hk = 2, .packed = true, .invariant = true}), decode);
  EXPECT_EQ(by_rows({.sq = 65, .hq = 2, .hk = 2, .packed = true, .invariant = true}), both(64));
}

// The tile of an invariant call is that of any cache and of any rows of K and V in memory.
TEST(DecodePlan, OfInvariantCallsDependsOnNoLayout) {
  for (const auto& [d, mask, softcap] : {std::tuple{128, causal(), 0.0},
                                         {256, causal(), 0.0},
                                         {256, window(100, 0), 0.0},
                                         {192, causal(), 9.0},
                                         {256, full(), 9.0}}) {
    const test::ForwardShape shape{
        .sq = 1, .d = d, .mask = mask, .softcap = softcap, .invariant = true};
    const auto tile = [&](auto change) {
      Problem p = forward_problem(shape);
      change(p);
      EXPECT_EQ(decode_rejects(p), "");
      const DecodePlan plan = decode_candidate(p, {}).plan;
      return std::array{plan.warps_per_group, plan.warp_groups, plan.block_keys};
    };
    const auto side_by_side = tile([](Problem&) {});
    EXPECT_EQ(tile([](Problem& p) { p.given.set(Arg::kCacheBatchIdx, true); }), side_by_side);
    EXPECT_EQ(tile([](Problem& p) { p.k.row += 3; }), side_by_side);
    EXPECT_EQ(tile([](Problem& p) { p.v.aligned = false; }), side_by_side);
    for (const int64_t page : {1, 16, 17, 256}) {
      const auto paged = [page](Problem& p) {
        p.cache.pages = Problem::Cache::Pages::kTable;
        p.cache.page = page;
      };
      EXPECT_EQ(tile(paged), side_by_side) << page;
    }
  }
}

// Packed sequences may be any number and any lengths: splits take room by the keys of all.
TEST(DecodePlan, RoomForSplitsIsBoundedByTheKeys) {
  const auto bytes = [](const test::ForwardShape& shape) {
    const Problem p = forward_problem(shape);
    return workspace_of(p, decode_candidate(p, {}).plan).end - 8192;
  };
  constexpr int64_t kKeys = int64_t{64} * 8192, kBytesOfKeys = kKeys * 2 * 2 * 128 * 2;
  test::ForwardShape shape{.batch = 64, .sq = 1, .sk = 8192, .packed = true, .invariant = true};
  EXPECT_EQ(bytes(shape), kKeys / 512 * 2 * 4 * 132 * 4);
  EXPECT_LT(bytes(shape), kBytesOfKeys / 100);
  shape.sq = 100;  // up to 64 rows of those that have so few
  EXPECT_EQ(bytes(shape), kKeys / 512 * 2 * 64 * 132 * 4);
  EXPECT_LT(bytes(shape), kBytesOfKeys / 7);
  shape.packed = false;
  shape.sq = 1;
  EXPECT_EQ(bytes(shape), int64_t{64} * 8 * 2 * 4 * 132 * 4);
  shape.sk = 1024;
  EXPECT_EQ(bytes(shape), 0);
}

// Splits that fill the CTAs are never more than these, whatever q blocks there are.
TEST(Slices, SplitsToFillAreNoMoreThanCtas) {
  std::mt19937 random(5);
  for (int round = 0; round < 1000; ++round) {
    const int ctas = 4 + static_cast<int>(random() % 200);
    std::vector<int> q_blocks(1 + random() % static_cast<unsigned>(ctas / 4));
    int chunks = 0;
    for (int& q_block : q_blocks)
      chunks += q_block = static_cast<int>(random() % (1u << random() % 13));
    const int spare = ctas - static_cast<int>(q_blocks.size());
    const int most = kernels::fill_max_chunks(chunks, kernels::divisor(spare));
    int count = 0;
    for (const int q_block : q_blocks) {
      const kernels::Splits splits = kernels::fill_splits(q_block, most);
      ASSERT_LE(splits.chunks, most);
      ASSERT_LT((splits.count - 1) * splits.chunks, std::max(q_block, 1));  // none is empty
      ASSERT_GE(splits.count * splits.chunks, q_block);
      count += splits.count;
    }
    ASSERT_LE(count, ctas);
  }
}

// If there are few long splits, none of them is much shorter than the others.
TEST(Slices, SplitsToFillAreEven) {
  const auto splits = [](int chunks, int max_chunks) {
    const kernels::Splits p = kernels::fill_splits(chunks, max_chunks);
    return std::pair{p.count, p.chunks};
  };
  EXPECT_EQ(splits(128, 121), (std::pair{2, 64}));
  EXPECT_EQ(splits(128, 63), (std::pair{3, 43}));
  EXPECT_EQ(splits(128, 8), (std::pair{16, 8}));
  EXPECT_EQ(splits(128, 1), (std::pair{128, 1}));
  EXPECT_EQ(splits(0, 9), (std::pair{1, 9}));
}

TEST(Slices, QuotientsAreThoseOfDivisions) {
  std::mt19937 random(6);
  for (int round = 0; round < 10000; ++round) {
    const int by = 1 + static_cast<int>(random() % 320);
    const int x = static_cast<int>(random() % ((1u << 31) / static_cast<unsigned>(by)));
    ASSERT_EQ(kernels::quotient(x, kernels::divisor(by)), x / by) << x << " / " << by;
    const int large = static_cast<int>(random() >> 2);
    const int over = kernels::quotient(large, kernels::divisor(by)) - large / by;
    ASSERT_TRUE(over == 0 || over == 1) << large << " / " << by;
  }
}

// A q block of several splits has room for them that no other q block has.
TEST(Slices, SplitsOfPackedQBlocksHaveRoomOfTheirOwn) {
  std::mt19937 random(4);
  for (int round = 0; round < 300; ++round) {
    int start = static_cast<int>(random() % 3000), free = 0;
    for (int i = 1 + static_cast<int>(random() % 60); i > 0; --i) {
      const int keys = static_cast<int>(random() % (1u << random() % 18));
      const int count =
          kernels::invariant_splits((keys + kernels::kChunkKeys - 1) / kernels::kChunkKeys).count;
      if (count > 1) {
        const int first = start / kernels::kPackedSplitKeys;
        ASSERT_GE(first, free);
        free = first + count;
        ASSERT_LE(free, (start + keys) / kernels::kPackedSplitKeys);
      }
      start += keys;
    }
  }
}

// Sinks change a constant of kernel_config.h, and nothing else of a plan.
TEST(DecodePlan, SinksAreAConstant) {
  const auto plan = [](bool sinks) {
    return decode_candidate(forward_problem({.sq = 1, .seqused = true, .sinks = sinks}), {}).plan;
  };
  DecodePlan with = plan(true);
  EXPECT_NE(kernel_config(with).find("kHasSinks = 1,"), std::string::npos);
  with.has_sinks = false;
  EXPECT_EQ(with, plan(false));
}

// How the work is divided and what a call takes, which measures near that on an H200
// (docs/performance).
TEST(DecodePlan, SaysWhatItExpects) {
  const auto details = [](const test::ForwardShape& shape) {
    const Problem p = forward_problem(shape);
    return describe(decode_candidate(p, {}).plan, p).details;
  };
  test::ForwardShape shape{.batch = 64, .sq = 1, .sk = 8192, .hq = 32, .hk = 8, .d = 128};
  Details d = details(shape);
  EXPECT_EQ(d.get<std::string>("schedule"), "stream_k");
  EXPECT_EQ(d.get<int64_t>("q_blocks"), 512);
  EXPECT_EQ(d.get<std::string>("bound"), "memory");
  EXPECT_NEAR(d.get<double>("estimate_us"), 495, 25);
  shape.sq = 16;
  d = details(shape);
  EXPECT_EQ(d.get<int64_t>("q_blocks"), 512);
  EXPECT_EQ(d.get<int64_t>("ctas"), 132);
  shape.sq = 64;  // two blocks of rows
  EXPECT_EQ(details(shape).get<std::string>("bound"), "products");
  shape.sq = 300;  // 1200 rows, of which 128 go into a block
  EXPECT_EQ(details(shape).get<int64_t>("q_blocks"), 5120);
  shape.invariant = true;
  d = details(shape);
  EXPECT_EQ(d.get<std::string>("schedule"), "invariant_splits");
  EXPECT_EQ(d.get<int64_t>("q_blocks"), 9728);
  EXPECT_EQ(d.get<int64_t>("splits"), 8);
  shape.sk = 1024;
  EXPECT_EQ(details(shape).get<int64_t>("splits"), 1);
}

// No other kernel computes them, however many rows they have.
TEST(DecodePlan, TakesEveryTreeMask) {
  for (const bool invariant : {false, true}) {
    for (const int64_t hq : {8, 64}) {
      for (const int64_t sq : {1, 64}) {
        Problem p = forward_problem({.sq = sq, .hq = hq, .hk = 8, .invariant = invariant});
        p.given.set(Arg::kTreeMask, true);
        Reasons reasons;
        const Candidates all = ranked(p, architecture_of({}).families, {}, {}, &reasons);
        ASSERT_EQ(all.size(), 1u);
        EXPECT_EQ(all[0]->tile.family, "sm90_decode");
        const DecodePlan plan = decode_candidate(p, {}).plan;
        EXPECT_EQ(plan.schedule == DecodeSchedule::kInvariantSplits, invariant);
        EXPECT_NE(kernel_config(plan).find("  kTree = 1,\n"), std::string::npos);
        p.given.set(Arg::kTreeMask, false);
        EXPECT_NE(kernel_config(decode_candidate(p, {}).plan).find("  kTree = 0,\n"),
                  std::string::npos);
      }
    }
  }
}

/// The problem of one query over pages of 16 keys that brings `tokens` rows, keys and queries
/// turned.
Problem appending(ForwardShape shape, int64_t tokens) {
  shape.seqused = true;
  Problem p = forward_problem(shape);
  p.cache.pages = Problem::Cache::Pages::kTable;
  p.cache.page = 16;
  p.append = {.given = true, .rotates = true, .batch = p.batch, .tokens = tokens};
  return p;
}

std::string not_fused(const Problem& p) { return not_fused(p, decode_candidate(p, {}).plan); }

// Few new rows are appended by the kernel that attends, where a launch would take longer.
TEST(DecodePlan, AppendsFewNewRows) {
  for (const int64_t batch : {1, 8, 64, 128}) {
    EXPECT_EQ(not_fused(appending({.batch = batch, .sq = 1, .hq = 32, .hk = 8}, batch)), "");
    EXPECT_EQ(not_fused(appending({.batch = batch, .sq = 1, .hq = 8, .hk = 1}, batch)), "");
  }
  EXPECT_EQ(not_fused(appending({.batch = 1, .sq = 16, .hq = 32, .hk = 8}, 16)), "");
  const auto refused = [](const Problem& p, const std::string& says) {
    EXPECT_TRUE(not_fused(p).find(says) != std::string::npos) << not_fused(p);
  };
  const ForwardShape many{.batch = 64, .sq = 1, .hq = 32, .hk = 8};
  refused(appending(many, 64 * 300), "which up to 8 take less than a launch");
  refused(appending({.batch = 0, .sq = 1}, 0), "there are no queries");
  refused(appending({.batch = 64, .sq = 16, .hq = 32, .hk = 8}, 1024), "dynamic scheduler");
  Problem host = appending(many, 64);
  host.append.host_numbers = 64;
  refused(host, "in the host's memory");
  refused(appending({.sq = 1, .mask = window(100, 0), .softcap = 9}, 2), "no registers");
  Problem copied = forward_problem({.sq = 1, .d = 100, .seqused = true, .invariant = true});
  copied.append = {.given = true, .batch = copied.batch, .tokens = copied.batch};
  refused(copied, "k and v are copied first");
}

// What it does besides are constants after all others, which stay as they are.
TEST(DecodePlan, AppendingIsAConstant) {
  const auto header = [](const Problem& p, bool fused) {
    const DecodePlan plan = decode_candidate(p, {}).plan;
    return kernel_config(fused ? fused_plan(p, plan) : plan);
  };
  Problem p = appending({.sq = 1, .mask = causal()}, 2);
  std::string text = header(p, false);
  const std::string none = "  kAppends = 0,\n  kRotatesQ = 0,\n  kUnreadRows = 0,\n};\n";
  ASSERT_TRUE(text.ends_with(none)) << text;
  text.resize(text.size() - none.size());
  EXPECT_EQ(header(p, true), text + "  kAppends = 1,\n  kRotatesQ = 1,\n  kUnreadRows = 0,\n};\n");
  p.append.rotates = false;
  EXPECT_EQ(header(p, true), text + "  kAppends = 1,\n  kRotatesQ = 0,\n  kUnreadRows = 0,\n};\n");
  // Rows that a mask may hide from all queries, or that come without one.
  for (const ForwardShape& shape : {ForwardShape{.sq = 1, .mask = window(100, 0)},
                                    {.sq = 1, .mask = chunked(300, causal())},
                                    {.sq = 1, .packed = true},
                                    {.sq = 1, .seqused_q = true}}) {
    const Problem hides = appending(shape, 2);
    EXPECT_TRUE(header(hides, true).ends_with("  kUnreadRows = 1,\n};\n"));
  }
}

TEST(DecodePlan, Rejects) {
  const auto why = [](const test::ForwardShape& shape, auto change) {
    Problem p = forward_problem(shape);
    change(p);
    return decode_rejects(p);
  };
  const auto as_is = [](Problem&) {};
  EXPECT_EQ(why({}, as_is), "");
  EXPECT_EQ(why({.dtype = DType::kF32}, as_is), "");
  EXPECT_EQ(why({.dtype = DType::kF32, .invariant = true}, as_is),
            "splits keys of f32, which `invariant` forbids here");
  EXPECT_EQ(why({}, [](Problem& p) { p.dtypes = OperandTypes::all(DType::kF64); }),
            "computes bf16, f16 and f32");
  for (const auto& [d, dv] : {std::pair{264, 264}, {576, 512}, {16, 257}})
    EXPECT_EQ(why({.d = d, .dv = dv}, as_is), "");
  EXPECT_EQ(why({.dtype = DType::kF32, .d = 264}, as_is),
            "computes d and dv up to 256, got 264 and 264");
  EXPECT_EQ(why({.d = 264}, [](Problem& p) { p.dtypes.k = p.dtypes.v = DType::kInt8; }),
            "computes d and dv up to 256, got 264 and 264");
  EXPECT_EQ(why({.d = 264, .invariant = true}, as_is),
            "computes d and dv above 256 without `invariant`");
  EXPECT_EQ(why({}, [](Problem& p) { p.dropout_p = 0.5; }), "computes without dropout");
  EXPECT_EQ(why({.invariant = true}, as_is),
            "computes `invariant` calls on contiguous keys up to 64 rows of a kv head, got 1024 "
            "queries of 4 heads");
  EXPECT_EQ(why({.invariant = true}, [](Problem& p) { p.given.set(Arg::kCacheBatchIdx, true); }),
            "");
  EXPECT_EQ(why({.sq = 1, .invariant = true}, [](Problem& p) { p.k.head = 12; }), "");
  EXPECT_EQ(forward_rejects(forward_problem({.sq = 16, .invariant = true})),
            "computes `invariant` calls from 65 rows of a kv head on, got 16 queries of 4 heads");
  EXPECT_EQ(why({}, [](Problem& p) { p.k.head = 12; }),
            "computes contiguous keys in rows of multiples of 16 bytes: k has a stride of 12 "
            "elements between heads, want a multiple of 8");
  EXPECT_EQ(why({}, [](Problem& p) { p.v.aligned = false; }),
            "computes contiguous keys in rows of multiples of 16 bytes: v has data at no multiple "
            "of 16 bytes");
  // Where no other kernel takes them, they are copied.
  EXPECT_EQ(why({}, [](Problem& p) { p.k.head = 12, p.given.set(Arg::kCacheBatchIdx, true); }), "");
  EXPECT_EQ(why({}, [](Problem& p) { p.k.head = 12, p.given.set(Arg::kTreeMask, true); }), "");
  EXPECT_NE(why({.packed = true}, [](Problem& p) { p.total_q = int64_t{1} << 29; })
                .find("less than 2^29 rows"),
            std::string::npos);
  for (int64_t Problem::Cache::*const size :
       {&Problem::Cache::entries, &Problem::Cache::ids, &Problem::Cache::page}) {
    EXPECT_EQ(why({}, [&](Problem& p) { p.cache.*size = (int64_t{1} << 31) - 1; }), "");
    EXPECT_NE(why({}, [&](Problem& p) { p.cache.*size = int64_t{1} << 31; }).find("2^31 pages"),
              std::string::npos);
  }
  EXPECT_NE(why({.batch = 1 << 19, .sk = 1 << 18}, as_is).find("up to 2^31 tiles"),
            std::string::npos);
}

// Two warpgroups share the columns of O, and CTAs with other rows the keys, up to four.
TEST(DecodePlan, OfWideHeads) {
  const auto plan_of = [](int64_t sq, int64_t hq, int64_t d, int64_t dv) {
    return decode_candidate(
               forward_problem({.sq = sq, .sk = 8192, .hq = hq, .hk = 1, .d = d, .dv = dv}), {})
        .plan;
  };
  for (const int64_t hq : {1, 16, 64, 65, 128, 192, 256, 257}) {
    const DecodePlan plan = plan_of(1, hq, 576, 512);
    EXPECT_TRUE(plan.is_wide_by_warpgroups());
    EXPECT_EQ(plan.row_blocks, hq > 256 ? 1 : ceil_div(hq, 64));
    EXPECT_EQ(plan.grid, 132 / plan.row_blocks);
    EXPECT_EQ(plan.k_stages, 2);
    EXPECT_LE(plan.shared_bytes, Card{}.shared_bytes);
  }
  EXPECT_EQ(plan_of(1, 16, 320, 256).k_stages, 4);
  EXPECT_EQ(plan_of(1, 16, 304, 304).value_dim, 384);
  EXPECT_FALSE(plan_of(1, 16, 256, 256).is_wide());
  // What TMA does not load is the other wide path's.
  Problem p = forward_problem({.sq = 1, .sk = 8192, .hq = 16, .hk = 1, .d = 576, .dv = 512});
  p.cache.pages = Problem::Cache::Pages::kTable;
  for (const auto& [page, leftpad] : {std::pair{12, false}, {24, false}, {24, true}}) {
    p.cache.page = page;
    p.given.set(Arg::kLeftpadK, leftpad);
    const DecodePlan plan = decode_candidate(p, {}).plan;
    EXPECT_TRUE(plan.is_wide());
    EXPECT_EQ(plan.is_wide_by_warpgroups(), page == 24 && !leftpad);
  }
}

// V may lie in K where rows are as far apart, and where it has no more panels than K as both are
// computed.
TEST(DecodePlan, ValuesMayLieInKeys) {
  const auto may = [](int64_t d, int64_t dv, int64_t sk, auto change) {
    Problem p = forward_problem({.sq = 1, .sk = sk, .hq = 16, .hk = 1, .d = d, .dv = dv});
    p.v = p.k;
    change(p);
    return may_have_v_in_k(p, decode_candidate(p, {}).plan);
  };
  const auto as_is = [](Problem&) {};
  EXPECT_TRUE(may(576, 512, 8192, as_is));
  EXPECT_TRUE(may(512, 512, 8192, as_is));
  EXPECT_FALSE(may(304, 304, 8192, as_is));  // 5 panels of 64 columns, and 6
  EXPECT_FALSE(may(504, 512, 8192, as_is));
  EXPECT_FALSE(may(576, 512, 8192, [](Problem& p) { p.v.row = 512; }));
  EXPECT_FALSE(may(576, 512, 8192, [](Problem& p) { p.v.batch += 8; }));
  EXPECT_TRUE(may(576, 512, 8192, [](Problem& p) { p.v.head = 8; }));  // there is one head
}

// The decode kernel's splits need a larger workspace than the forward kernel.
TEST(DecodePlan, GivesWayWhereItsWorkspaceDoesNotFit) {
  test::ForwardShape shape{.batch = 8, .sq = 1, .sk = 65536, .hq = 32, .hk = 8};
  const Problem p = forward_problem(shape);
  shape.max_workspace = workspace_of(p, decode_candidate(p, {}).plan).end;
  EXPECT_EQ(chosen(shape), "sm90_decode");
  --shape.max_workspace;
  EXPECT_EQ(chosen(shape), "sm90_forward");
}

}  // namespace
}  // namespace fulgur::cuda
