// What the CUDA engine decides about a backward pass: how dQ is computed, the stages, the waves,
// and that everything that the kernels keep in the workspace has a place of its own there.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "backward_call.h"
#include "cuda/engine/choose.h"
#include "cuda/sm90/backward.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/families.h"

namespace fulgur::cuda {
namespace {

using test::backward_problem;
using test::BackwardOptions;
using test::ForwardShape;

std::vector<HopperBackwardPlan> plans(const Problem& p, std::vector<std::string>* rejected) {
  std::vector<HopperBackwardPlan> all;
  for (const HopperBackwardTile& tile : backward_candidates(p, {}, rejected)) {
    EXPECT_GT(tile.cycles, 0);
    all.push_back(tile.plan);
  }
  return all;
}

std::vector<HopperBackwardPlan> plans(const Problem& p) {
  std::vector<std::string> rejected;
  return plans(p, &rejected);
}

/// The plan that stores dS.
HopperBackwardPlan stored(const Problem& p) {
  const std::vector<HopperBackwardPlan> all = plans(p);
  const auto found = std::ranges::find(all, false, &HopperBackwardPlan::sums);
  EXPECT_NE(found, all.end());
  return *found;
}

std::string joined(const std::vector<std::string>& sentences) {
  std::string text;
  for (const std::string& s : sentences) text += s + "\n";
  return text;
}

bool contains(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

const std::vector<Mask> kMasks = {
    full(),          causal(),     window(300, -1),        window(-1, 200),
    window(100, 50), chunked(150), chunked(333, causal()), chunked(50, window(20, 3))};

std::vector<Problem> many_problems() {
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

TEST(HopperBackwardPlan, SumsUpDqOrStoresDs) {
  for (const Problem& p : many_problems()) {
    std::vector<std::string> rejected;
    const std::vector<HopperBackwardPlan> all = plans(p, &rejected);
    const int64_t most = p.softcap > 0 ? 64 : 128;
    const bool narrow = p.d <= most && p.dv <= most;
    const auto shorter = std::ranges::count(all, 1, &HopperBackwardPlan::consumers);
    EXPECT_LE(shorter, narrow && p.sq <= 1024 ? 1 : 0);
    ASSERT_EQ(all.size(), narrow ? 3u + static_cast<size_t>(shorter) : 1u);
    EXPECT_EQ(all.front().sums, narrow);
    EXPECT_FALSE(all.front().ordered);
    EXPECT_EQ(std::ranges::count(all, true, &HopperBackwardPlan::ordered), narrow ? 1 : 0);
    EXPECT_EQ(std::ranges::count(all, false, &HopperBackwardPlan::sums), 1);
    EXPECT_EQ(contains(joined(rejected), "dQ as sums: "), !narrow);
    for (const HopperBackwardPlan& plan : all) {
      EXPECT_EQ(plan.ds_bytes == 0, plan.sums);
      EXPECT_EQ(plan.sums_floats(p.hq) == 0, !plan.sums);
      EXPECT_EQ(plan.turns(p.hq) == 0, !plan.ordered);
      EXPECT_EQ(plan.repairs(), plan.has_left || plan.has_right);
    }
  }
}

TEST(HopperBackwardPlan, SumsHaveAnOrderWhereItIsWanted) {
  for (const int64_t d : {64, 128}) {
    std::vector<std::string> rejected;
    const std::vector<HopperBackwardPlan> all =
        plans(backward_problem({.d = d}, {.deterministic = true}), &rejected);
    ASSERT_EQ(all.size(), 2u);
    EXPECT_TRUE(all[0].ordered);
    EXPECT_FALSE(all[1].sums);
    EXPECT_TRUE(contains(joined(rejected), "would differ from run to run"));
  }
}

// What an invariant call takes depends on its options alone.
TEST(HopperBackwardPlan, InvariantStoresDs) {
  for (const int64_t d : {64, 128}) {
    std::vector<std::string> rejected;
    const std::vector<HopperBackwardPlan> all =
        plans(backward_problem({.d = d, .invariant = true}), &rejected);
    ASSERT_EQ(all.size(), 1u);
    EXPECT_FALSE(all[0].sums);
    EXPECT_TRUE(contains(joined(rejected), "depends on the batch"));
  }
}

// `invariant`: nothing that a sequence's bits depend on does on the batch.
TEST(HopperBackwardPlan, InvariantDoesNotLookAtTheBatch) {
  for (const Mask& mask : {full(), causal(), window(300, 0), window(1000000, 5),
                           chunked(700, causal()), chunked(1000000)}) {
    for (const int64_t d : {64, 128, 256}) {
      std::set<std::string> headers;
      for (const int64_t batch : {1, 7, 1000}) {
        for (const int64_t s : {1, 500, 4096}) {
          headers.insert(kernel_config(stored(backward_problem({.batch = batch,
                                                                .sq = s,
                                                                .sk = s,
                                                                .d = d,
                                                                .mask = mask,
                                                                .packed = true,
                                                                .invariant = true}))));
        }
      }
      EXPECT_EQ(headers.size(), 1u);
    }
  }
}

TEST(HopperBackwardPlan, FitsTheMachine) {
  for (const Problem& p : many_problems()) {
    for (const HopperBackwardPlan& plan : plans(p)) {
      EXPECT_LE(plan.keys_shared_bytes, 232448);
      EXPECT_LE(plan.rows_shared_bytes, 232448);
      EXPECT_GE(plan.q_stages, 2);
      EXPECT_GE(plan.o_stages, 2);
      EXPECT_GE(plan.row_stages, 2);
      const bool narrow = std::max(plan.head_dim, plan.value_dim) <= 64;
      EXPECT_EQ(plan.k_stages, narrow || (plan.sums && !plan.ordered) ? 2 : 1);
      EXPECT_EQ(plan.ds_stages, narrow || plan.k_stages == 1 ? 2 : 1);
      EXPECT_EQ(plan.sums_stages, !plan.sums ? 0 : plan.ordered && plan.block_rows == 64 ? 3 : 2);
      EXPECT_EQ(plan.block_keys % plan.block_rows, 0);
      EXPECT_EQ(plan.rows_of_block() % plan.block_rows, 0);
      EXPECT_EQ(plan.threads(), 128 * (plan.consumers + (plan.sums ? 2 : 1)));
      EXPECT_TRUE(!plan.wide() || plan.block_rows == 64);
      // dK and dV of 64 keys by one warpgroup: as many accumulators as registers hold.
      EXPECT_TRUE(plan.wide() || plan.head_dim + plan.value_dim <= 320);
      EXPECT_EQ(plan.grid, 132);
    }
  }
}

TEST(HopperBackwardPlan, DerivesStages) {
  const auto stages = [](int64_t batch, int64_t d, bool stores) {
    const Problem p = backward_problem({.batch = batch, .d = d});
    const HopperBackwardPlan plan = stores ? stored(p) : plans(p).front();
    EXPECT_EQ(plan.k_stages, d == 64 || (d == 128 && !stores) ? 2 : 1);
    return std::array{plan.q_stages, plan.o_stages, plan.row_tiles, plan.row_stages};
  };
  EXPECT_EQ(stages(64, 64, false), (std::array{3, 2, 4, 3}));
  EXPECT_EQ(stages(64, 128, false), (std::array{3, 2, 2, 4}));
  EXPECT_EQ(stages(64, 128, true), (std::array{4, 4, 2, 4}));
  EXPECT_EQ(stages(64, 256, false), (std::array{3, 2, 1, 4}));
  // Few blocks of rows are smaller, so that all SMs have one.
  EXPECT_EQ(stages(1, 64, true)[2], 1);
  EXPECT_EQ(stages(1, 128, true)[2], 1);
}

// A warpgroup a CTA where that gives more SMs work and every block of 64 keys has one of its own.
TEST(HopperBackwardPlan, ShortCallsTakeOneWarpgroupACta) {
  const auto fastest = [](const ForwardShape& shape, BackwardOptions options = {}) {
    std::vector<std::string> rejected;
    const auto tiles = backward_candidates(backward_problem(shape, options), {}, &rejected);
    return std::ranges::min_element(tiles, {}, &HopperBackwardTile::cycles)->plan;
  };
  for (const int64_t d : {64, 128}) {
    for (const Mask& mask : {full(), causal()}) {
      for (const auto& [s, heads] : {std::pair{128, 32}, {256, 16}, {512, 16}, {1024, 8}}) {
        const ForwardShape shape{
            .batch = 1, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = mask};
        const HopperBackwardPlan plan = fastest(shape);
        EXPECT_EQ(plan.consumers, 1) << s << " rows, " << heads << " heads, d " << d;
        EXPECT_EQ(plan.block_keys, 64);
        EXPECT_FALSE(plan.wide());
        EXPECT_EQ(plan.block_rows, d == 64 && s > 256 ? 128 : 64);
        ForwardShape other = shape;
        other.batch = 4;  // more blocks than SMs
        EXPECT_EQ(fastest(other).consumers, 2);
        EXPECT_EQ(fastest(shape, {.deterministic = true}).consumers, 2);
      }
    }
  }
}

/// The smallest wave there is: a block of rows, of the largest, of one head of k and v.
bool is_least(const HopperBackwardPlan& plan) {
  const kernels::Wave& wave = plan.waves[0].wave;
  const int rows = plan.head_dim > 128                           ? 128
                   : plan.head_dim > 64 || plan.block_rows == 64 ? 256
                                                                 : 512;
  return wave.heads * wave.batches == 1 && wave.tiles * plan.block_rows == rows;
}

// dS stays within what a call may take, unless waves are already as small as they can be.
TEST(HopperBackwardPlan, DsFitsTheWorkspace) {
  int cut = 0, least = 0;
  for (const std::vector<Problem>& problems : {many_problems(), large_problems()}) {
    for (const Problem& p : problems) {
      const HopperBackwardPlan plan = stored(p);
      EXPECT_TRUE(plan.ds_bytes <= max_ds_bytes(p) || is_least(plan))
          << plan.ds_bytes << " bytes; " << p.batch << " x " << p.sq << " x " << p.sk << ", heads "
          << p.hq << " " << p.hk << ", d " << p.d << ", mask " << p.mask.left << " "
          << p.mask.right;
      EXPECT_EQ(plan.carries,
                plan.waves[0].wave.tiles * plan.block_rows < std::max<int64_t>(p.sq, 1));
      cut += plan.carries;
      least += is_least(plan) && plan.ds_bytes > max_ds_bytes(p);
    }
  }
  EXPECT_GT(cut, 20);
  EXPECT_LE(least, 3);
}

TEST(HopperBackwardPlan, DsOfOneBlockOfRowsIsTheLeast) {
  const Problem p = backward_problem({.batch = 1, .sq = 1, .sk = 1 << 20, .hq = 64, .hk = 1});
  const HopperBackwardPlan plan = stored(p);
  EXPECT_GT(plan.ds_bytes, max_ds_bytes(p));
  EXPECT_EQ(plan.ds_bytes, int64_t{64} * (1 << 20) * 64 * 2);
}

int64_t bytes_of(const Problem& p, const HopperBackwardPlan& plan) {
  return workspace_of(p, plan).end;
}

/// The problem, whose workspace may take so many bytes.
Problem within(Problem p, int64_t bytes) {
  p.max_workspace = bytes;
  return p;
}

/// The least that the plan that stores dS may have, which it takes where nothing fits.
int64_t min_bytes(const Problem& p) { return bytes_of(p, stored(within(p, 1))); }

/// Problems whose max_workspace is the least, and some more.
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

TEST(HopperBackwardPlan, WavesFitMaxWorkspace) {
  int fewer_pairs = 0, fewer_rows = 0;
  for (const Problem& p : tight_problems()) {
    const HopperBackwardPlan roomy = stored(within(p, 0)), tight = stored(p);
    const int64_t wanted = bytes_of(p, roomy);
    EXPECT_LE(bytes_of(p, tight), p.max_workspace);
    EXPECT_GE(tight.waves.size(), roomy.waves.size());
    // Right at what it wants nothing changes, below the least nothing is smaller.
    EXPECT_EQ(stored(within(p, wanted)), roomy);
    EXPECT_EQ(stored(within(p, min_bytes(p) - 1)), stored(within(p, 1)));
    fewer_pairs += tight.waves.size() > roomy.waves.size() && !tight.carries;
    fewer_rows += tight.carries && !roomy.carries;
  }
  EXPECT_GT(fewer_pairs, 20);
  EXPECT_GT(fewer_rows, 20);
}

// Less memory never makes a plan faster, and what waves do not decide stays.
TEST(HopperBackwardPlan, SmallerWavesAreSlower) {
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
    const HopperBackwardTile smaller = tile(bytes);
    EXPECT_GE(smaller.cycles, cycles);
    EXPECT_GT(smaller.plan.waves.size(), 1u);
    EXPECT_EQ(smaller.plan.tile(), stored(p).tile());
    cycles = smaller.cycles;
  }
}

// Every head, sequence and row is in one wave, and in one of its blocks.
TEST(HopperBackwardPlan, WavesCoverAll) {
  for (const std::vector<Problem>& problems :
       {many_problems(), large_problems(), tight_problems()}) {
    for (const Problem& p : problems) {
      for (const HopperBackwardPlan& plan : plans(p)) {
        const int row_tiles = ceil_div(p.sq, plan.block_rows);
        std::map<std::pair<int, int>, int> next;  // row tile of a head and a sequence
        for (const auto& [wave, key_blocks, row_blocks] : plan.waves) {
          ASSERT_GE(wave.heads, 1);
          ASSERT_GE(wave.batches, 1);
          for (int h = wave.first_head; h < wave.first_head + wave.heads; ++h) {
            for (int b = wave.first_batch; b < wave.first_batch + wave.batches; ++b) {
              ASSERT_EQ((next[{h, b}]), wave.first_tile) << "carries come in order";
              next[{h, b}] += wave.tiles;
            }
          }
          const int pairs = wave.heads * wave.batches;
          const int tiles = std::min(wave.tiles, row_tiles - wave.first_tile);
          ASSERT_EQ(key_blocks.blocks, std::max(ceil_div(p.sk, plan.block_keys), 1));
          ASSERT_EQ(key_blocks.pairs, pairs);
          ASSERT_EQ(row_blocks.blocks, ceil_div(tiles * plan.block_rows, plan.rows_of_block()));
          ASSERT_EQ(row_blocks.pairs, pairs * plan.pair_heads);
          for (const kernels::Blocks& blocks : {key_blocks, row_blocks}) {
            ASSERT_TRUE(blocks.bunch >= 1 && blocks.bunches >= 1);
            ASSERT_LE(blocks.bunch * blocks.bunches, blocks.pairs);
            if (blocks.order == kernels::kAlternating) {
              ASSERT_TRUE(plan.sums && plan.has_right && !plan.has_left);
              ASSERT_EQ(blocks.bunches % 2, 0);
            }
          }
          // Blocks of rows begin where a wave does.
          ASSERT_EQ(wave.first_tile * plan.block_rows % plan.rows_of_block(), 0);
        }
        ASSERT_EQ(next.size(), static_cast<size_t>(p.hk * plan.parts * p.batch));
        for (const auto& [pair, tile] : next) ASSERT_GE(tile, row_tiles);
        ASSERT_TRUE(!plan.sums || plan.waves.size() == 1);
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

/// Every tile of dS of a wave has a place of its own, which the kernels by keys and by rows agree
/// on. Returns their number.
int64_t check_places(const Problem& p, const HopperBackwardPlan& plan, const kernels::Wave& wave,
                     const std::vector<kernels::Lengths>& lengths) {
  const kernels::Band band = band_of(plan, p.mask);
  const kernels::ScoreTile each = plan.score_tile();
  const int heads = plan.pair_heads;
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
                               int64_t{head % heads} * plan.score_tiles.unit);
        }
      }
    }
  }
  return tiles;
}

void check_places(const ForwardShape& shape, bool compact) {
  const Problem p = backward_problem(shape, {.deterministic = true});
  const HopperBackwardPlan plan = stored(p);
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

// And where max_workspace makes the waves.
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

// What a kernel does not depend on stays out of its kernel_config.h, so that it is compiled once.
TEST(HopperBackwardPlan, KernelsAreSharedBetweenPlans) {
  const auto kernels = [](ForwardShape shape, const BackwardOptions& with = {}) {
    std::map<std::string, std::string> headers;
    shape.hk = shape.hq;  // groups have a kernel more
    for (const KernelUse& use : hopper_backward_kernels(stored(backward_problem(shape, with))))
      headers[use.entry] = use.request.kernel_config;
    return headers;
  };
  auto plain = kernels({.mask = causal()});
  const auto same = [&](std::map<std::string, std::string> other) {
    std::set<std::string> names;
    for (const auto& [entry, header] : plain) {
      if (other[entry] == header)
        names.insert(entry.substr(std::string("fulgur_backward_").size()));
    }
    return names;
  };
  using Names = std::set<std::string>;
  EXPECT_EQ(plain.size(), 4u);
  EXPECT_EQ(same(kernels({.mask = causal(), .softcap = 30})), (Names{"prepare", "rows"}));
  EXPECT_EQ(same(kernels({.mask = causal(), .alibi = true})), (Names{"prepare", "rows"}));
  EXPECT_EQ(same(kernels({.mask = causal()}, {.dlse = true})), (Names{"keys", "repair", "rows"}));
  EXPECT_EQ(same(kernels({.mask = causal(), .seqused = true})), Names{"prepare"});
  EXPECT_EQ(same(kernels({.mask = causal(), .seqused_q = true})), Names{});
  EXPECT_EQ(same(kernels({.mask = causal(), .dropout = 0.1})), (Names{"prepare", "rows"}));
  EXPECT_EQ(same(kernels({.mask = window(5, 5)})), Names{"prepare"});
  EXPECT_EQ(same(kernels({.d = 112, .mask = causal()})), (Names{"prepare", "repair"}));
  EXPECT_EQ(same(kernels({.d = 80, .mask = causal()})), Names{"prepare"});
  EXPECT_EQ(same(kernels({.mask = causal(), .packed = true})), Names{});
  EXPECT_EQ(same(kernels({.dtype = DType::kF16, .mask = causal()})), Names{});
}

// That of dQ from sums depends on its panels of 64 columns, and, as it repairs what bounds hide, on
// all that the scores depend on where there is one.
TEST(HopperBackwardPlan, RoundingIsSharedBetweenPlans) {
  const auto header = [](const ForwardShape& shape) {
    const HopperBackwardPlan plan = plans(backward_problem(shape)).at(0);
    EXPECT_TRUE(plan.sums);
    for (const KernelUse& use : hopper_backward_kernels(plan)) {
      if (use.entry == std::string("fulgur_backward_round")) return use.request.kernel_config;
    }
    return std::string();
  };
  const std::string plain = header({.d = 128, .mask = causal()});
  EXPECT_NE(plain, "");
  EXPECT_EQ(header({.d = 80, .dv = 128, .mask = causal()}), plain);
  EXPECT_NE(header({.d = 128, .mask = causal(), .alibi = true}), plain);
  EXPECT_NE(header({.d = 128}), plain);
  EXPECT_EQ(header({.d = 128, .alibi = true, .seqused = true}), header({.d = 128}));
  EXPECT_NE(header({.d = 64, .mask = causal()}), plain);
}

// Measured on an H100: blocks that walk down eight long q heads each fall after one another, and
// L2 keeps the rows of none.
TEST(HopperBackwardPlan, LongGroupsInTurnsAreDivided) {
  const auto parts_of_turns = [](int64_t s, int64_t hk) {
    const ForwardShape shape = {.batch = 2, .sq = s, .sk = s, .hq = 64, .hk = hk, .d = 128};
    return plans(backward_problem(shape, {.deterministic = true})).at(0).parts;
  };
  EXPECT_EQ(parts_of_turns(4096, 8), 1);
  EXPECT_EQ(parts_of_turns(8192, 8), 8);
  EXPECT_EQ(parts_of_turns(16384, 8), 8);
  EXPECT_EQ(parts_of_turns(16384, 64), 1);
}

// Measured on an H100, batch 1 and 2: a kernel that rounds is shorter than one by rows, and nobody
// waits for a turn.
TEST(HopperBackwardPlan, ShortCallsSumUpInNoOrder) {
  for (const Mask& mask : {full(), causal()}) {
    for (const int64_t d : {64, 128}) {
      for (const int64_t s : {128, 256, 512, 1024}) {
        for (const int64_t heads : {8, 16, 32}) {
          std::vector<std::string> rejected;
          const auto tiles = backward_candidates(
              backward_problem(
                  {.batch = 1, .sq = s, .sk = s, .hq = heads, .hk = heads, .d = d, .mask = mask}),
              {}, &rejected);
          const auto best = std::ranges::min_element(tiles, {}, &HopperBackwardTile::cycles);
          EXPECT_EQ(best->plan.tile().family, "sm90_backward_sums") << s << " " << heads;
        }
      }
    }
  }
}

// Groups of q heads are divided where they leave SMs idle, but not where the batch
// would decide it for a sequence. Their kernel depends on what is written, not on how it was
// computed.
TEST(HopperBackwardPlan, GroupsAreDivided) {
  const auto parts = [](ForwardShape shape, const BackwardOptions& with = {}) {
    std::set<int64_t> found;
    for (const HopperBackwardPlan& plan : plans(backward_problem(shape, with))) {
      EXPECT_EQ(plan.parts * plan.pair_heads, shape.hq / shape.hk * plan.row_parts);
      found.insert(plan.parts);
    }
    return found;
  };
  using Parts = std::set<int64_t>;
  const ForwardShape few = {.batch = 1, .sq = 4096, .sk = 4096, .hq = 8, .hk = 1, .d = 128};
  EXPECT_FALSE(parts(few).contains(1));
  EXPECT_EQ(parts({.batch = 16, .sq = 4096, .sk = 4096, .hq = 64, .hk = 8, .d = 128}), Parts{1});
  for (ForwardShape shape = few; shape.sq <= 8192; shape.sq = shape.sk = 2 * shape.sq) {
    shape.invariant = true;
    EXPECT_EQ(parts(shape), Parts{1});
  }
  // Rows, too, but not where blocks that take turns begin at their diagonals.
  const ForwardShape one = {
      .batch = 1, .sq = 8192, .sk = 8192, .hq = 1, .hk = 1, .d = 128, .mask = causal()};
  for (const HopperBackwardPlan& plan : plans(backward_problem(one)))
    EXPECT_EQ(plan.row_parts > 1, plan.sums && !plan.ordered);
  const ForwardShape cross = {.batch = 1, .sq = 16384, .sk = 256, .hq = 16, .hk = 16};
  for (const HopperBackwardPlan& plan : plans(backward_problem(cross)))
    EXPECT_EQ(plan.row_parts > 1, plan.sums);
  const auto join = [](const ForwardShape& shape, size_t plan) {
    for (const KernelUse& use : hopper_backward_kernels(plans(backward_problem(shape)).at(plan))) {
      if (use.entry == std::string("fulgur_backward_join")) return use.request.kernel_config;
    }
    return std::string();
  };
  ForwardShape other = few;
  other.mask = causal();
  const std::string causal_join = join(other, 0);
  EXPECT_NE(causal_join, "");
  EXPECT_NE(causal_join, join(few, 0)) << "only masks have repairs";
  EXPECT_EQ(causal_join, join(other, 1));  // in turns
  EXPECT_EQ(causal_join, join(other, 2));  // from dS
  other.mask = window(5, 5);
  other.alibi = other.seqused = true;
  EXPECT_EQ(join(other, 0), causal_join);
  other.d = 64;
  EXPECT_NE(join(other, 0), causal_join);
}

// The last blocks are cut where the last round would be incomplete: only blocks of one length whose
// pairs are whole, with sums in no order, of rows that L2 holds.
TEST(HopperBackwardPlan, LastBlocksAreCut) {
  const auto cut = [](const ForwardShape& shape, const BackwardOptions& with = {}) {
    int most = 0;
    for (const HopperBackwardPlan& plan : plans(backward_problem(shape, with))) {
      most = std::max(most, plan.cut_blocks);
      if (plan.cut_blocks == 0) continue;
      EXPECT_TRUE(plan.sums && !plan.ordered && plan.parts == 1 && plan.waves.size() == 1);
      EXPECT_EQ(plan.cut_blocks, plan.grid - 1);
      // The sums of blocks that are cut have a place.
      const kernels::Blocks& blocks = plan.waves[0].key_blocks;
      int first = blocks.pairs;
      for (int i = 0; i < plan.cut_blocks; ++i)
        first = std::min(first, block_of(blocks, blocks.blocks * blocks.pairs - 1 - i).pair);
      EXPECT_GE(first, plan.first_cut_pair);
      EXPECT_LT(first, plan.first_cut_pair + blocks.bunch);
    }
    return most;
  };
  for (const int64_t s : {4096, 8192, 16384}) {
    for (const int64_t d : {64, 80, 96, 128}) {
      const ForwardShape shape = {
          .batch = 16384 / s, .sq = s, .sk = s, .hq = 2048 / d, .hk = 2048 / d, .d = d};
      EXPECT_EQ(cut(shape), 131) << d << " " << s;
      EXPECT_EQ(cut(shape, {.deterministic = true}), 0);
      ForwardShape other = shape;
      other.mask = causal();
      EXPECT_EQ(cut(other), 0);
      other = shape;
      other.packed = true;
      EXPECT_EQ(cut(other), 0);
      other = shape;
      other.invariant = true;
      EXPECT_EQ(cut(other), 0);
    }
    EXPECT_EQ(cut({.batch = 16384 / s, .sq = s, .sk = s, .hq = 8, .hk = 8, .d = 256}), 0);
  }
  // Whole rounds, short blocks, and rows that L2 does not hold.
  const auto of = [](int64_t batch, int64_t s, int64_t hq, int64_t hk) {
    return ForwardShape{.batch = batch, .sq = s, .sk = s, .hq = hq, .hk = hk, .d = 128};
  };
  EXPECT_EQ(cut(of(33, 4096, 16, 16)), 0);
  EXPECT_EQ(cut(of(64, 256, 16, 16)), 0);
  EXPECT_EQ(cut(of(4, 4096, 64, 8)), 0);
  EXPECT_EQ(cut(of(1, 131072, 3, 3)), 0);
  // Or where the workspace has no room for their sums.
  ForwardShape shape = of(4, 4096, 16, 16);
  const HopperBackwardPlan roomy = plans(backward_problem(shape)).at(0);
  shape.max_workspace = workspace_of(backward_problem(shape), roomy).end - 1;
  const HopperBackwardPlan tight = plans(backward_problem(shape)).at(0);
  EXPECT_EQ(tight.cut_blocks, 0);
  EXPECT_EQ(tight.first_cut_pair, 0);
  EXPECT_TRUE(tight.sums);
  EXPECT_EQ(describe(roomy).details.get<int64_t>("cut_k_blocks"), 131);
  EXPECT_EQ(describe(tight).details.get<int64_t>("cut_k_blocks"), 0);
}

// Where the workspace has no room for the sums of so many parts there are fewer.
TEST(HopperBackwardPlan, PartsFitTheWorkspace) {
  ForwardShape shape = {.batch = 1, .sq = 4096, .sk = 4096, .hq = 8, .hk = 1, .d = 128};
  const HopperBackwardPlan roomy = plans(backward_problem(shape)).at(0);
  ASSERT_TRUE(roomy.joins());
  shape.max_workspace = workspace_of(backward_problem(shape), roomy).end - 1;
  const Problem tight = backward_problem(shape);
  const HopperBackwardPlan plan = plans(tight).at(0);
  EXPECT_LT(plan.parts, roomy.parts);
  EXPECT_LE(workspace_of(tight, plan).end, shape.max_workspace);
}

// The gradient of sinks is a kernel more, that of q, k and v knows of sinks by LSE alone.
TEST(HopperBackwardPlan, SinksAreAKernelMore) {
  const auto kernels = [](const ForwardShape& shape, bool dsinks) {
    std::set<std::string> texts;
    const Problem p = backward_problem(shape, {.dsinks = dsinks});
    EXPECT_EQ(backward_rejects(p), "");
    for (const KernelUse& use : hopper_backward_kernels(plans(p).at(0)))
      texts.insert(use.request.source + use.request.kernel_config);
    return texts;
  };
  const auto beside = [](std::set<std::string> all, const std::set<std::string>& others) {
    for (const std::string& other : others) EXPECT_EQ(all.erase(other), 1u);
    return all;
  };
  const auto plain = kernels({.d = 64}, false), packed = kernels({.d = 64, .packed = true}, false);
  EXPECT_EQ(kernels({.d = 64, .sinks = true}, false), plain);
  const auto more = beside(kernels({.d = 64, .sinks = true}, true), plain);
  ASSERT_EQ(more.size(), 1u);
  EXPECT_TRUE(more.begin()->starts_with("sm90/backward/sinks.cu"));
  // Its text depends on how rows lie, and on nothing else.
  const auto f16 = kernels({.dtype = DType::kF16, .d = 64}, false);
  EXPECT_EQ(beside(kernels({.dtype = DType::kF16, .d = 64, .sinks = true}, true), f16), more);
  EXPECT_NE(beside(kernels({.d = 64, .packed = true, .sinks = true}, true), packed), more);
}

TEST(HopperBackwardPlan, SaysHowDqIsComputed) {
  const Family* const families[] = {&hopper_backward_family()};
  const auto said = [&](const Problem& p) {
    Reasons reasons;
    const Candidates all = ranked(p, families, {}, {}, &reasons);
    const auto& plan = dynamic_cast<const HopperBackwardCandidate&>(*all.at(0)).plan();
    return joined(describe(plan).decisions) + joined(reasons.decisions) + joined(reasons.rejected);
  };
  const std::string sums = said(backward_problem({.sq = 4096, .sk = 4096, .hk = 8, .d = 128}));
  EXPECT_TRUE(contains(sums, "dQ as sums in f32")) << sums;
  EXPECT_TRUE(contains(sums, "not deterministic")) << sums;
  EXPECT_TRUE(contains(sums, "tile chosen by the cost model")) << sums;
  EXPECT_TRUE(contains(sums, "tile sm90_backward 64 x 128: predicted")) << sums;
  const std::string turns =
      said(backward_problem({.sq = 4096, .sk = 4096, .d = 128}, {.deterministic = true}));
  EXPECT_TRUE(contains(turns, "blocks of keys add in turns, deterministic")) << turns;
  EXPECT_TRUE(contains(turns, "dQ as sums in no order: the last bits")) << turns;
  EXPECT_TRUE(contains(turns, "tile sm90_backward 64 x 128: predicted")) << turns;
  const std::string stored = said(backward_problem(
      {.batch = 64, .sq = 256, .sk = 256, .hk = 8, .d = 128}, {.deterministic = true}));
  EXPECT_TRUE(contains(stored, "dQ by a kernel of its own")) << stored;
  EXPECT_TRUE(contains(stored, "from dS in memory: deterministic")) << stored;
  EXPECT_TRUE(contains(stored, "tile sm90_backward_turns 64 x 128: predicted")) << stored;
  EXPECT_TRUE(contains(stored, "1 waves of 8 kv heads of 64 sequences")) << stored;
  EXPECT_FALSE(contains(stored, "q heads of their group")) << stored;
  const std::string parts = said(backward_problem({.batch = 1, .hk = 1, .d = 128}));
  EXPECT_TRUE(contains(parts, "parts are added up by a kernel of their own")) << parts;
  const std::string wide = said(backward_problem({.d = 256}));
  EXPECT_TRUE(contains(wide, "one warpgroup for each of the two")) << wide;
  EXPECT_TRUE(contains(wide, "dQ as sums: computes d and dv up to 128, got 256 and 256")) << wide;
  const std::string cut = said(backward_problem(
      {.batch = 1, .sq = 65536, .sk = 65536, .hq = 1, .hk = 1, .invariant = true}));
  EXPECT_TRUE(contains(cut, "dK and dV carried on in f32")) << cut;
  const std::string odd = said(backward_problem({.d = 17}));
  for (const char* name : {"q", "k", "v", "dout"})
    EXPECT_TRUE(contains(odd, std::string(name) + " is copied to rows of multiples of 16 bytes"));
  EXPECT_TRUE(contains(odd, "gradients are stored by elements")) << odd;
  EXPECT_FALSE(contains(odd, "dsinks")) << odd;
  const std::string sinks = said(backward_problem({.sinks = true}, {.dsinks = true}));
  EXPECT_TRUE(contains(sinks, "dsinks by a kernel of its own")) << sinks;
}

TEST(HopperBackwardPlan, TakesTheFastestFormThatFits) {
  const Family* const families[] = {&hopper_backward_family()};
  const Problem p = backward_problem({.batch = 4, .sq = 1000, .sk = 1500, .hq = 2, .hk = 2});
  Reasons reasons;
  const auto best = [&](int64_t bytes) {
    reasons = {};
    const Candidates all = ranked(within(p, bytes), families, {}, {}, &reasons);
    for (const auto& candidate : all) EXPECT_EQ(candidate->workspace, all[0]->workspace);
    return all.at(0);
  };
  const int64_t sums = bytes_of(p, plans(p).at(0)), most = bytes_of(p, stored(p));
  const int64_t least = min_bytes(p);
  ASSERT_LT(least, sums);
  ASSERT_LT(sums, most);
  const auto says = [&](const std::string& what) {
    return contains(joined(reasons.rejected), what)
               ? testing::AssertionSuccess()
               : testing::AssertionFailure() << joined(reasons.rejected);
  };
  const auto wants = [](const char* tile, int64_t bytes, int64_t limit) {
    return fmt::format("tile {}: wants {} bytes of workspace, max_workspace is {}", tile, bytes,
                       limit);
  };
  EXPECT_EQ(ranked(p, families, {}, {}, &reasons).size(), 3u);
  EXPECT_TRUE(says(fmt::format("times as long, wants {} bytes of workspace", most)));
  EXPECT_EQ(best(least)->workspace, least);
  EXPECT_EQ(reasons.rejected.size(), 3u);
  EXPECT_TRUE(says(wants("sm90_backward_sums 64 x 128", sums, least)));
  EXPECT_TRUE(says(fmt::format("of the predicted time, but {} bytes of workspace", most)));
  EXPECT_EQ(best(sums - 1)->tile.family, "sm90_backward");
  EXPECT_TRUE(says(wants("sm90_backward_sums 64 x 128", sums, sums - 1)));
  for (const int64_t bytes : {sums, most - 1, most})
    EXPECT_EQ(ranked(within(p, bytes), families, {}, {}, &reasons).at(0)->tile.family,
              "sm90_backward_sums");
  EXPECT_EQ(best(least - 1)->workspace, least);
}

TEST(HopperBackwardPlan, RejectsWhatItDoesNotCompute) {
  const auto why = [](const ForwardShape& shape) {
    return backward_rejects(backward_problem(shape));
  };
  EXPECT_EQ(why({}), "");
  EXPECT_EQ(why({.dtype = DType::kF32}), "computes bf16 and f16");
  EXPECT_EQ(why({.d = 320}), "computes d and dv up to 256, got 320 and 320");
  EXPECT_EQ(why({.d = 64, .dv = 264}), "computes d and dv up to 256, got 64 and 264");
  EXPECT_TRUE(contains(why({.batch = 1, .sq = 1, .sk = int64_t{1} << 29, .hq = 1, .hk = 1}),
                       "sequences of less than 2^29 rows"));
}

}  // namespace
}  // namespace fulgur::cuda
