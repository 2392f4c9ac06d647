// How the CUDA engine divides a backward pass that stores dS into waves, and that every score tile
// has a place of its own in the workspace.
#include "cuda/sm90/backward_waves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "backward_plans.h"
#include "cuda/sm90/common.h"

namespace fulgur::cuda {
namespace {

using namespace sm90;

using test::backward_problem;
using test::bytes_of;
using test::ForwardShape;
using test::kMasks;
using test::many_problems;
using test::min_bytes;
using test::plans;
using test::stored;
using test::within;

/// Shapes whose dS does not fit the workspace at once.
std::vector<Problem> large_problems() {
  std::vector<Problem> all;
  for (const Mask& mask :
       {full(), causal(), window(4095, 0), window(-1, 2000), chunked(6000, causal())}) {
    for (const int64_t s : {8192, 32768, 131072}) {
      for (const auto& [hq, hk] : {std::pair{64, 8}, {1, 1}, {8, 1}, {16, 16}}) {
        for (const int64_t d : {64, 128, 256}) {
          for (const int64_t batch : {1, 3}) {
            all.push_back(backward_problem({.batch = batch,
                                            .sq = s,
                                            .sk = s,
                                            .hq = hq,
                                            .hk = hk,
                                            .d = d,
                                            .mask = mask,
                                            .packed = batch == 3}));
          }
        }
      }
    }
  }
  return all;
}

/// Whether a wave is as small as it can be: one row block, of the largest, of one kv head.
bool is_smallest(const BackwardPlan& plan) {
  const kernels::Wave& wave = plan.waves[0].wave;
  const int rows = plan.head_dim > 128                           ? 128
                   : plan.head_dim > 64 || plan.block_rows == 64 ? 256
                                                                 : 512;
  return wave.heads * wave.batches == 1 && wave.tiles * plan.block_rows == rows;
}

// dS stays within what a call may take, unless waves are already as small as they can be.
TEST(BackwardWaves, DsFitsTheWorkspace) {
  int cut = 0, smallest = 0;
  for (const std::vector<Problem>& problems : {many_problems(), large_problems()}) {
    for (const Problem& p : problems) {
      const BackwardPlan plan = stored(p);
      EXPECT_TRUE(plan.ds_bytes <= max_ds_bytes(p) || is_smallest(plan))
          << plan.ds_bytes << " bytes; " << p.batch << " x " << p.sq << " x " << p.sk << ", heads "
          << p.hq << " " << p.hk << ", d " << p.d << ", mask " << p.mask.left << " "
          << p.mask.right;
      EXPECT_EQ(plan.splits_rows,
                plan.waves[0].wave.tiles * plan.block_rows < std::max<int64_t>(p.sq, 1));
      cut += plan.splits_rows;
      smallest += is_smallest(plan) && plan.ds_bytes > max_ds_bytes(p);
    }
  }
  EXPECT_GT(cut, 20);
  EXPECT_LE(smallest, 3);
}

TEST(BackwardWaves, DsOfOneRowBlockAlwaysHasRoom) {
  const Problem p = backward_problem({.batch = 1, .sq = 1, .sk = 1 << 20, .hq = 64, .hk = 1});
  const BackwardPlan plan = stored(p);
  EXPECT_GT(plan.ds_bytes, max_ds_bytes(p));
  EXPECT_EQ(plan.ds_bytes, int64_t{64} * (1 << 20) * 64 * 2);
}

/// Problems whose max_workspace is the smallest, or halfway to what they want.
std::vector<Problem> tight_problems() {
  std::vector<Problem> all;
  for (const std::vector<Problem>& problems : {many_problems(), large_problems()}) {
    for (size_t i = 0; i < problems.size(); i += 3) {
      const Problem& p = problems[i];
      const int64_t least = min_bytes(p);
      all.push_back(within(p, least));
      all.push_back(within(p, (least + bytes_of(p, stored(p))) / 2));
    }
  }
  return all;
}

TEST(BackwardWaves, WavesFitMaxWorkspace) {
  int fewer_heads = 0, fewer_rows = 0;
  for (const Problem& p : tight_problems()) {
    const BackwardPlan roomy = stored(within(p, 0)), tight = stored(p);
    const int64_t wanted = bytes_of(p, roomy);
    EXPECT_LE(bytes_of(p, tight), p.max_workspace);
    EXPECT_GE(tight.waves.size(), roomy.waves.size());
    // With exactly what it wants nothing changes; below the smallest workspace nothing is smaller.
    EXPECT_EQ(stored(within(p, wanted)), roomy);
    EXPECT_EQ(stored(within(p, min_bytes(p) - 1)), stored(within(p, 1)));
    fewer_heads += tight.waves.size() > roomy.waves.size() && !tight.splits_rows;
    fewer_rows += tight.splits_rows && !roomy.splits_rows;
  }
  EXPECT_GT(fewer_heads, 20);
  EXPECT_GT(fewer_rows, 20);
}

// Less memory never makes a plan faster, and changes nothing but its waves.
TEST(BackwardWaves, SmallerWavesAreSlower) {
  const Problem p =
      backward_problem({.batch = 4, .sq = 2048, .sk = 2048, .hk = 8, .mask = causal()});
  std::vector<std::string> rejected;
  const auto tile = [&](int64_t bytes) {
    return backward_candidates(within(p, bytes), {}, &rejected).at(2);
  };
  const int64_t least = min_bytes(p), most = bytes_of(p, stored(p));
  ASSERT_LT(least, most / 4);
  double cycles = tile(most).cycles;
  for (int64_t bytes = most / 2; bytes >= least; bytes /= 2) {
    const Fitting<BackwardPlan> smaller = tile(bytes);
    EXPECT_GE(smaller.cycles, cycles);
    EXPECT_GT(smaller.plan.waves.size(), 1u);
    EXPECT_EQ(smaller.plan.tile(), stored(p).tile());
    cycles = smaller.cycles;
  }
}

// Every head, sequence and row is in one wave, and in one of its blocks.
TEST(BackwardWaves, WavesCoverAll) {
  for (const std::vector<Problem>& problems :
       {many_problems(), large_problems(), tight_problems()}) {
    for (const Problem& p : problems) {
      for (const BackwardPlan& plan : plans(p)) {
        const int row_tiles = ceil_div(p.sq, plan.block_rows);
        std::map<std::pair<int, int>, int> next;  // row tile of a head and a sequence
        for (const auto& [wave, key_blocks, row_blocks] : plan.waves) {
          ASSERT_GE(wave.heads, 1);
          ASSERT_GE(wave.batches, 1);
          for (int h = wave.first_head; h < wave.first_head + wave.heads; ++h) {
            for (int b = wave.first_batch; b < wave.first_batch + wave.batches; ++b) {
              ASSERT_EQ((next[{h, b}]), wave.first_tile) << "partial dK and dV pass on in order";
              next[{h, b}] += wave.tiles;
            }
          }
          const int heads = wave.heads * wave.batches;
          const int tiles = std::min(wave.tiles, row_tiles - wave.first_tile);
          ASSERT_EQ(key_blocks.blocks, std::max(ceil_div(p.sk, plan.block_keys), 1));
          ASSERT_EQ(key_blocks.batch_heads, heads);
          ASSERT_EQ(row_blocks.blocks, ceil_div(tiles * plan.block_rows, plan.rows_of_block()));
          ASSERT_EQ(row_blocks.batch_heads, heads * plan.split_heads);
          for (const kernels::BlockSchedule& blocks : {key_blocks, row_blocks}) {
            ASSERT_TRUE(blocks.section_heads >= 1 && blocks.sections >= 1);
            ASSERT_LE(blocks.section_heads * blocks.sections, blocks.batch_heads);
            if (blocks.order == kernels::kAlternating) {
              ASSERT_TRUE(plan.accumulates_dq() && plan.has_right && !plan.has_left);
              ASSERT_EQ(blocks.sections % 2, 0);
            }
          }
          // A wave begins with a row block.
          ASSERT_EQ(wave.first_tile * plan.block_rows % plan.rows_of_block(), 0);
        }
        ASSERT_EQ(next.size(), static_cast<size_t>(p.hk * plan.splits * p.batch));
        for (const auto& [head, tile] : next) ASSERT_GE(tile, row_tiles);
        ASSERT_TRUE(!plan.accumulates_dq() || plan.waves.size() == 1);
      }
    }
  }
}

/// The lengths of the sequences of a call.
std::vector<kernels::Lengths> lengths_of(const Problem& p, std::mt19937& random) {
  std::vector<kernels::Lengths> all;
  const auto up_to = [&](int64_t most) {
    return static_cast<int>(random() % (static_cast<uint64_t>(std::max<int64_t>(most, 0)) + 1));
  };
  int q = 0, k = 0;
  for (int b = 0; b < p.batch; ++b) {
    kernels::Lengths n{0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)};
    if (p.packed) {
      n = {q, k, up_to(std::min(p.sq, p.total_q - q)), up_to(std::min(p.sk, p.total_k - k))};
      q += n.sq;
      k += n.sk;
    }
    if (p.has(Arg::kSeqUsedQ)) n.sq = up_to(n.sq);
    if (p.has(Arg::kSeqUsedK)) n.sk = up_to(n.sk);
    all.push_back(n);
  }
  return all;
}

/// Every score tile of a wave has a place of its own, on which the kernels by keys and by rows
/// agree. Returns their number.
int64_t check_places(const Problem& p, const BackwardPlan& plan, const kernels::Wave& wave,
                     const std::vector<kernels::Lengths>& lengths) {
  const kernels::Band band = band_of(plan, p.mask);
  const kernels::ScoreTile each = plan.score_tile();
  const int heads = plan.split_heads;
  std::vector<bool> taken(static_cast<size_t>(plan.ds_bytes / plan.tile_bytes()));
  int64_t tiles = 0;
  for (int b = wave.first_batch; b < wave.first_batch + wave.batches; ++b) {
    const kernels::Lengths& n = lengths[b];
    const int end = std::min(wave.first_tile + wave.tiles, ceil_div(n.sq, each.rows));
    for (int head = 0; head < wave.heads * heads; ++head) {
      for (int tile = wave.first_tile; tile < end; ++tile) {
        const kernels::KeyTiles keys = kernels::key_tiles_of(band, n, each, tile);
        const auto at = [&](int of_head, int key_tile) {
          return kernels::score_tile(plan.score_tiles, wave, band, n, each, heads, b, of_head, tile,
                                     key_tile);
        };
        for (int key_tile = keys.begin; key_tile < keys.end; ++key_tile) {
          const int64_t place = at(head, key_tile);
          if (place < 0 || place >= static_cast<int64_t>(taken.size()) || taken[place]) {
            ADD_FAILURE() << "no place for " << b << " " << head << " " << tile << " " << key_tile
                          << ": " << place << " of " << taken.size();
            return 0;
          }
          taken[place] = true;
          ++tiles;
          // The kernel by rows counts from the first key tile, that by keys from the first head.
          EXPECT_EQ(place, at(head, keys.begin) + key_tile - keys.begin);
          EXPECT_EQ(place, at(head / heads * heads, key_tile) +
                               int64_t{head % heads} * plan.score_tiles.head_tiles);
        }
      }
    }
  }
  return tiles;
}

void check_places(const ForwardShape& shape, bool compact) {
  const Problem p = backward_problem(shape, {.deterministic = true});
  const BackwardPlan plan = stored(p);
  SCOPED_TRACE(testing::Message() << p.sq << " x " << p.sk << ", d " << p.d << ", mask "
                                  << p.mask.left << " " << p.mask.right << " " << p.mask.chunk
                                  << ", " << plan.waves.size() << " waves");
  EXPECT_EQ(plan.score_tiles.compact, compact);
  std::mt19937 random(7);
  for (int times = 0; times < (p.alike() ? 1 : 4); ++times) {
    const std::vector<kernels::Lengths> lengths = lengths_of(p, random);
    int64_t tiles = 0;
    for (const BackwardWave& wave : plan.waves) tiles += check_places(p, plan, wave.wave, lengths);
    if (p.alike()) {
      EXPECT_GT(tiles, 0);
    }
  }
}

TEST(ScoreTiles, EachHasAPlace) {
  for (const Mask& mask : kMasks) {
    for (const auto& [sq, sk] :
         {std::pair{1, 700}, {64, 64}, {1000, 1000}, {700, 1500}, {1500, 700}}) {
      for (const int64_t d : {64, 128, 256}) {
        for (int i = 0; i < 8; ++i) {
          const bool packed = i & 1;
          check_places({.batch = 3,
                        .sq = sq,
                        .sk = sk,
                        .hq = 4,
                        .hk = 2,
                        .d = d,
                        .mask = mask,
                        .packed = packed,
                        .seqused_q = (i & 2) != 0,
                        .seqused = (i & 4) != 0},
                       packed);
        }
      }
    }
  }
}

// The same where a call is cut into waves of heads, sequences and rows.
TEST(ScoreTiles, EachHasAPlaceInItsWave) {
  const std::vector<Mask> masks = {full(),
                                   causal(),
                                   window(3000, -1),
                                   window(-1, 1000),
                                   window(20000, 100),
                                   chunked(5000),
                                   chunked(8192, causal())};
  for (const Mask& mask : masks) {
    for (const int64_t d : {64, 128, 256}) {
      for (int i = 0; i < 4; ++i) {
        const auto check = [&](ForwardShape shape) {
          shape.d = d;
          shape.mask = mask;
          shape.seqused_q = i & 1;
          shape.seqused = (i & 2) != 0;
          check_places(shape, false);
        };
        check({.batch = 1, .sq = 30000, .sk = 32768, .hq = 2, .hk = 1});
        check({.batch = 1, .sq = 32768, .sk = 20000, .hq = 1, .hk = 1});
        check({.batch = 3, .sq = 8000, .sk = 8192, .hq = 6, .hk = 3});
      }
    }
  }
}

// Packed sequences whose rows do not fit: each has as much room as the longest.
TEST(ScoreTiles, PackedSequencesThatDoNotFitHaveAPlace) {
  for (const Mask& mask : {full(), causal(), window(30000, 100), chunked(9000)}) {
    for (const int64_t d : {64, 128}) {
      check_places({.batch = 3,
                    .sq = 20000,
                    .sk = 20000,
                    .hq = 2,
                    .hk = 1,
                    .d = d,
                    .mask = mask,
                    .packed = true},
                   false);
    }
  }
}

// The same where max_workspace makes waves smaller.
TEST(ScoreTiles, EachHasAPlaceInLessWorkspace) {
  for (const Mask& mask : kMasks) {
    for (const int64_t d : {16, 128}) {
      for (const bool packed : {false, true}) {
        ForwardShape shape{
            .batch = 3, .sq = 1500, .sk = 700, .hq = 8, .hk = 2, .d = d, .mask = mask};
        shape.packed = packed;
        const Problem p = backward_problem(shape, {.deterministic = true});
        shape.max_workspace = min_bytes(p);
        check_places(shape, false);
        shape.max_workspace = bytes_of(p, stored(p)) - 1;
        check_places(shape, packed);
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::cuda
