// The formulas that the host and the device share (src/kernels/shared/*.h, sm90/forward/layout.h):
// every row, key and q tile is met exactly once, as the mask says, and the map of shared memory
// holds together.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "call/mask.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/forward_candidates.h"
#include "forward_call.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda {
namespace {

using namespace sm90;

using test::forward_problem;

TEST(Strips, EachIsInOneBlock) {
  for (const auto& [block_strips, heads] :
       {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 1}, {1, 3}, {2, 5}, {3, 4}, {4, 2}}) {
    for (int rows = 0; rows <= 2000; rows += 7) {
      const int blocks = kernels::blocks_of(rows, block_strips, heads);
      int strip = 0, strips_before = 0;
      for (int block = 0; block < blocks; ++block) {
        ASSERT_EQ(kernels::first_strip(rows, block_strips, block, heads), strip);
        const int next = kernels::first_strip(rows, block_strips, block + 1, heads);
        ASSERT_GE(next - strip, block_strips - 1) << "short blocks have one less";
        ASSERT_LE(next - strip, block_strips);
        ASSERT_GE(next - strip, strips_before) << "and come first";
        strips_before = next - strip;
        strip = next;
      }
      // A few short blocks may have empty strips after the end.
      ASSERT_EQ(strip, std::max(heads * kernels::strips_of(rows), (block_strips - 1) * blocks));
    }
  }
}

// The number of blocks may also be given, from as many as the strips need to blocks of two of
// three.
TEST(Strips, EachIsInOneOfMoreBlocks) {
  constexpr int kBlockStrips = 3;
  for (int rows = 1; rows <= 2000; rows += 7) {
    const int strips = kernels::strips_of(rows), fewest = kernels::blocks_of(rows, kBlockStrips);
    for (int blocks = fewest; blocks == fewest || 2 * blocks <= strips; ++blocks) {
      int strip = 0, strips_before = 0;
      for (int block = 0; block < blocks; ++block) {
        const auto [first, end] = kernels::strips_of_block_of(blocks, rows, kBlockStrips, block);
        ASSERT_EQ(first, strip);
        ASSERT_TRUE(end - first == kBlockStrips || end - first == kBlockStrips - 1);
        ASSERT_GE(end - first, strips_before) << "the shorter ones come first";
        strips_before = end - first;
        strip = end;
      }
      ASSERT_EQ(strip, std::max(strips, 2 * blocks));
    }
    const auto [first, end] = kernels::strips_of_block_of(fewest, rows, kBlockStrips, fewest / 2);
    ASSERT_EQ(first, kernels::first_strip(rows, kBlockStrips, fewest / 2));
    ASSERT_EQ(end, kernels::first_strip(rows, kBlockStrips, fewest / 2 + 1));
  }
}

struct Shape {
  int64_t sq, sk;
  Mask mask;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const auto& [sq, sk] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 900}, {64, 64}, {65, 63}, {300, 1000}, {1000, 300}, {777, 777}, {200, 0}}) {
    for (const Mask& mask :
         {full(), causal(), window(100, -1), window(-1, 30), window(0, 0), window(70, 20),
          window(2000, 2000), chunked(1), chunked(64), chunked(100), chunked(999), chunked(3000),
          chunked(80, causal()), chunked(256, causal()), chunked(150, window(70, 20)),
          chunked(90, window(200, -1))}) {
      all.push_back({sq, sk, mask});
      all.push_back({sq, sk, top_left(mask)});
    }
  }
  return all;
}

kernels::Band band(const Mask& mask) {
  const bool chunks = mask.chunk > 0;
  return band_of(KernelKey{.has_left = chunks || mask.left >= 0,
                           .has_right = chunks || mask.right >= 0,
                           .has_chunk = chunks,
                           .top_left = mask.top_left},
                 mask);
}

TEST(Band, IsThatOfTheMask) {
  for (const auto& [sq, sk, mask] : shapes()) {
    const Sequence s{0, 0, sq, sk};
    const kernels::Lengths n{0, 0, static_cast<int>(sq), static_cast<int>(sk)};
    for (int i = 0; i < sq; ++i) {
      const KeyRange want = visible_keys(mask, s, i);
      const kernels::KeyRange got = kernels::visible_keys(band(mask), n, i);
      ASSERT_EQ(want.empty(), got.begin >= got.end) << i;
      if (want.empty()) continue;
      ASSERT_EQ(got.begin, want.begin) << i;
      ASSERT_EQ(got.end, want.end) << i;
    }
  }
}

/// Walks the strips of a q tile and compares what they meet with the tiles of the mask.
/// Whether rows [i, i_end) see all, some or none of the keys [j, j_end), row by row.
Tile classify(const Mask& mask, const Sequence& s, int64_t i, int64_t i_end, int64_t j,
              int64_t j_end) {
  int64_t seen = 0;
  const int64_t all = (i_end - i) * (j_end - j);
  for (; i < i_end; ++i) {
    const KeyRange keys = visible_keys(mask, s, i);
    seen += std::max<int64_t>(0, std::min(keys.end, j_end) - std::max(keys.begin, j));
  }
  return seen == 0 ? Tile::kEmpty : seen == all ? Tile::kFull : Tile::kPartial;
}

void check_item(const kernels::Work& work, const Shape& shape, int block_strips, int tile_keys,
                int heads, const kernels::QTile& tile, bool splits, std::map<int, int>& visits) {
  const int64_t sq = shape.sq, sk = shape.sk;
  const Mask& mask = shape.mask;
  const Sequence s{0, 0, sq, sk};
  const kernels::Lengths n{0, 0, static_cast<int>(sq), static_cast<int>(sk)};
  const kernels::KeyTiles tiles =
      kernels::key_tiles_of(work, band(mask), n, block_strips, tile_keys, splits, tile, heads);
  int rightmost = -1;  // that any strip computes
  const int first = kernels::first_strip(n.sq, block_strips, tile.block, heads);
  const int end = kernels::first_strip(n.sq, block_strips, tile.block + 1, heads);
  for (int strip = first; strip < end; ++strip) {
    const int row = kernels::kStripRows * (strip / heads);
    if (row >= sq) continue;
    const int64_t row_end = std::min<int64_t>(row + kernels::kStripRows, sq);
    const auto tile = [&](int t) {
      const int64_t begin = int64_t{t} * tile_keys;
      return begin >= sk ? Tile::kEmpty
                         : classify(mask, s, row, row_end, begin, std::min(sk, begin + tile_keys));
    };
    kernels::KeyWalk walk = kernels::walk_of_strip(band(mask), n, tile_keys, tiles, row);
    ASSERT_FALSE(walk.no_more_work());
    int t = tiles.end - 1;
    for (int i = 0; i < walk.skip_front; ++i) ASSERT_EQ(tile(t--), Tile::kEmpty);
    bool is_first = true;
    for (; walk.more(); walk.next()) {
      ASSERT_EQ(walk.tile, t--);
      const Tile state = tile(walk.tile);
      const bool inside = (int64_t{walk.tile} + 1) * tile_keys <= sk;
      const bool masked = walk.masked(band(mask), is_first);
      ASSERT_TRUE(masked || (state == Tile::kFull && inside));
      // Where the last strip has less than 64 rows it may mask a tile that all of them see.
      if (row_end == row + kernels::kStripRows) {
        ASSERT_TRUE(!masked || state != Tile::kFull || !inside);
      }
      is_first = false;
      rightmost = std::max(rightmost, walk.tile);
      ++visits[walk.tile * 10000 + strip];
    }
    for (int i = 0; i < walk.skip_back; ++i) ASSERT_EQ(tile(t--), Tile::kEmpty);
    ASSERT_EQ(t, tiles.begin - 1) << "a warpgroup must release every buffer of the q tile";
  }
  ASSERT_TRUE(tile.split >= 0 || tiles.end <= tiles.begin || rightmost == tiles.end - 1);
}

TEST(KeyWalk, MeetsTheTilesOfTheMask) {
  for (const Shape& shape : shapes()) {
    for (const auto& [block_strips, tile_keys, heads] :
         {std::tuple{3, 80, 1}, {4, 64, 1}, {2, 16, 5}, {3, 128, 1}, {3, 80, 4}, {4, 64, 2}}) {
      SCOPED_TRACE(testing::Message()
                   << shape.sq << " x " << shape.sk << ", mask " << shape.mask.left << " "
                   << shape.mask.right << " " << shape.mask.chunk << ", tile " << 64 * block_strips
                   << " x " << tile_keys << ", " << heads << " heads");
      kernels::Work work{};
      work.row_blocks = kernels::blocks_of(static_cast<int>(shape.sq), block_strips, heads);
      std::map<int, int> visits;
      for (int block = 0; block < work.row_blocks; ++block) {
        check_item(work, shape, block_strips, tile_keys, heads, {block, 0, 0, -1}, false, visits);
        if (HasFatalFailure()) return;
      }
      for (const auto& [where, count] : visits) ASSERT_EQ(count, 1);
      // What no strip visited it sees nothing of.
      const Sequence s{0, 0, shape.sq, shape.sk};
      for (int64_t strip = 0; 64 * (strip / heads) < shape.sq; ++strip) {
        const int64_t row = 64 * (strip / heads);
        for (int64_t t = 0; t * tile_keys < shape.sk; ++t) {
          if (visits.count(static_cast<int>(t * 10000 + strip)) > 0) continue;
          ASSERT_EQ(classify(shape.mask, s, row, std::min(shape.sq, row + 64), t * tile_keys,
                             std::min(shape.sk, (t + 1) * tile_keys)),
                    Tile::kEmpty);
        }
      }
    }
  }
}

/// The plan of the tile that the cost model likes best.
ForwardPlan plan_of(const Problem& p) {
  std::vector<std::string> rejected;
  const std::vector<Fitting<ForwardPlan>> tiles = forward_candidates(p, {}, &rejected);
  return std::min_element(tiles.begin(), tiles.end(),
                          [](const auto& x, const auto& y) { return x.cycles < y.cycles; })
      ->plan;
}

TEST(Work, EveryBlockIsOneItemOrItsParts) {
  int split = 0, sections = 0, shared = 0;
  for (const int64_t batch : {1, 3, 20}) {
    for (const int64_t sq : {1, 200, 3000}) {
      for (const int64_t sk : {100, 9000}) {
        for (const Mask& mask : {full(), causal(), window(50, -1), chunked(700, causal())}) {
          const Problem p =
              forward_problem({.batch = batch, .sq = sq, .sk = sk, .hq = 6, .hk = 2, .mask = mask});
          const ForwardPlan plan = plan_of(p);
          const kernels::Work& work = plan.work;
          const int heads = plan.block_heads(p);
          ASSERT_TRUE(heads == 1 || heads == 3);
          shared += heads == 3;
          const kernels::Lengths n{0, 0, static_cast<int>(sq), static_cast<int>(sk)};
          std::map<std::array<int, 3>, std::vector<kernels::KeyTiles>> seen;
          std::set<int> splits_seen;
          for (int i = 0; i < work.q_tiles; ++i) {
            const kernels::QTile tile =
                kernels::q_tile_of(work, 6 / heads, plan.split_tail, band_of(plan, p.mask), i);
            ASSERT_GE(tile.block, 0);
            ASSERT_LT(tile.head, 6 / heads);
            ASSERT_LT(tile.batch, batch);
            const bool again = tile.split >= 0 && !splits_seen.insert(tile.split).second;
            ASSERT_FALSE(again);
            seen[{tile.batch, tile.head, tile.block}].push_back(
                kernels::key_tiles_of(work, band_of(plan, p.mask), n, plan.consumers,
                                      plan.block_keys, plan.split_tail, tile, heads));
          }
          EXPECT_LT(kernels::q_tile_of(work, 6 / heads, plan.split_tail, band_of(plan, p.mask),
                                       work.q_tiles)
                        .block,
                    0);
          ASSERT_EQ(seen.size(), static_cast<size_t>(kernels::blocks_of(work)));
          ASSERT_EQ(splits_seen.size(),
                    static_cast<size_t>(kernels::split_blocks(work) * work.splits));
          ASSERT_TRUE(splits_seen.empty() ||
                      *splits_seen.rbegin() + 1 == static_cast<int>(splits_seen.size()));
          for (auto& [block, tiles] : seen) {  // the splits of a block are its tiles, each once
            const kernels::KeyTiles all =
                kernels::key_tiles_of(work, band_of(plan, p.mask), n, plan.consumers,
                                      plan.block_keys, false, {block[2], 0, 0, -1}, heads);
            std::sort(tiles.begin(), tiles.end(),
                      [](const auto& x, const auto& y) { return x.begin < y.begin; });
            ASSERT_EQ(tiles.front().begin, all.begin);
            ASSERT_EQ(tiles.back().end, all.end);
            for (size_t i = 1; i < tiles.size(); ++i) {
              ASSERT_EQ(tiles[i].begin, tiles[i - 1].end);
            }
            split += tiles.size() > 1;
          }
          sections += work.bulk_heads > 0;
        }
      }
    }
  }
  EXPECT_GT(split, 0);
  EXPECT_GT(sections, 0);
  EXPECT_GT(shared, 0);
}

TEST(Layout, BuffersAreAlignedApartAndFit) {
  for (int64_t d = 16; d <= 256; d += 16) {
    for (const int64_t dv : {int64_t{16}, d, int64_t{256}}) {
      std::vector<std::string> rejected;
      for (const auto& [plan, cycles, tuned_only] :
           forward_candidates(forward_problem({.d = d, .dv = dv}), {}, &rejected)) {
        const bool maps_tiles = (d / 16) % 2 == 0;
        const int sorted = maps_tiles ? kernels::max_sorted_blocks(plan.consumers) : 0;
        const kernels::ForwardLayout map = kernels::forward_layout({.types = operands_of(plan),
                                                                    .head_dim = plan.head_dim,
                                                                    .value_dim = plan.value_dim,
                                                                    .consumers = plan.consumers,
                                                                    .block_keys = plan.block_keys,
                                                                    .q_stages = plan.q_stages,
                                                                    .k_stages = plan.k_stages,
                                                                    .v_stages = plan.v_stages,
                                                                    .maps_tiles = maps_tiles});
        struct Region {
          int begin, bytes, alignment;
        };
        std::vector<Region> regions = {
            {map.q_full, 8 * plan.q_stages, 8},
            {map.q_empty, 8 * plan.q_stages, 8},
            {map.k_full, 8 * plan.k_stages, 8},
            {map.k_empty, 8 * plan.k_stages, 8},
            {map.v_full, 8 * plan.v_stages, 8},
            {map.v_empty, 8 * plan.v_stages, 8},
            {map.v_tail, 8, 8},
            {map.last, 4 * plan.consumers, 4},
            {map.dropout_key, 8, 8},
            {map.tile_info,
             maps_tiles ? static_cast<int>(sizeof(kernels::TileInfo)) * plan.k_stages : 0, 16},
            {map.ordered, sorted > 0 ? 8 : 0, 8},
            {map.order, 2 * sorted, 2},
            {map.view, static_cast<int>(sizeof(kernels::View)) * plan.q_stages * plan.consumers,
             16}};
        for (int i = 0; i < plan.q_stages * plan.consumers; ++i) {
          // 64 rows in panels of 64 columns: Q comes in and, where there are two buffers, O leaves.
          const int64_t columns = plan.q_stages > 1 ? std::max(d, dv) : d;
          const int bytes = 64 * 128 * static_cast<int>((columns + 63) / 64);
          ASSERT_EQ(map.strip_bytes, bytes);
          regions.push_back({map.q + i * map.strip_bytes, bytes, 1024});
        }
        for (int i = 0; i < plan.k_stages; ++i) {
          regions.push_back({map.k + i * map.k_bytes,
                             plan.block_keys * 128 * static_cast<int>((d + 63) / 64), 1024});
        }
        for (int i = 0; i < plan.v_stages; ++i) {
          regions.push_back({map.v + i * map.v_bytes,
                             plan.block_keys * 128 * static_cast<int>((dv + 63) / 64), 1024});
        }
        std::sort(regions.begin(), regions.end(),
                  [](const Region& x, const Region& y) { return x.begin < y.begin; });
        int end = 0;
        for (const Region& r : regions) {
          ASSERT_EQ(r.begin % r.alignment, 0);
          ASSERT_GE(r.begin, end) << "overlaps what is before it";
          end = r.begin + r.bytes;
        }
        ASSERT_EQ(end, map.end);
        ASSERT_LE(end, map.bytes);
        ASSERT_EQ(plan.shared_bytes + 2 * sorted, map.bytes);
        ASSERT_LE(map.bytes, 232448);
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::cuda
