// The formulas of the backward pass that the host and the device share
// (src/kernels/backward/work.h, sm90/backward/layout.h), against the definition, score by
// score.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "kernels/sm90/backward/layout.h"

namespace fulgur::kernels {
namespace {

/// Masks with all small bounds, a bound of -1 hides nothing; and all that are less than a chunk;
/// all of them aligned bottom-right and top-left.
std::vector<Band> bands(int most) {
  std::vector<Band> all;
  for (int left = -1; left <= most; ++left) {
    for (int right = -1; right <= most; ++right) {
      all.push_back({left >= 0, right >= 0, std::max(left, 0), std::max(right, 0), 0, false});
      for (int chunk = std::max(left, right) + 1; left >= 0 && right >= 0 && chunk <= most; ++chunk)
        all.push_back({true, true, left, right, chunk, false});
    }
  }
  for (size_t i = 0, count = all.size(); i < count; ++i) {
    all.push_back(all[i]);
    all.back().top_left = true;
  }
  return all;
}

bool sees(const Band& band, const Lengths& n, int row, int key) {
  const KeyRange keys = visible_keys(band, n, row);
  return row < n.sq && key < n.sk && key >= keys.begin && key < keys.end;
}

/// Whether some row of a tile sees some key of another.
bool meets(const Band& band, const Lengths& n, const ScoreTile& each, int tile, int key_tile) {
  for (int row = tile * each.rows; row < (tile + 1) * each.rows; ++row) {
    for (int key = key_tile * each.keys; key < (key_tile + 1) * each.keys; ++key) {
      if (sees(band, n, row, key)) return true;
    }
  }
  return false;
}

/// Calls visit(band, lengths) for all small lengths and bounds.
template <class Visit>
void for_small(const Visit& visit) {
  const std::vector<Band> masks = bands(7);
  for (int sq = 0; sq <= 9; ++sq) {
    for (int sk = 0; sk <= 9; ++sk) {
      for (const Band& band : masks) {
        visit(band, Lengths{0, 0, sq, sk});
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

std::string text(const Band& band, const Lengths& n) {
  return testing::PrintToString(std::vector{n.sq, n.sk, band.has_left ? band.left : -1,
                                            band.has_right ? band.right : -1, band.chunk,
                                            int{band.top_left}});
}

// A row tile is among those of a key tile, and this one among its key tiles, exactly if some row
// sees some key; so both kernels agree on which score tiles there are.
TEST(BackwardWork, RowTilesAndKeyTilesMeet) {
  for (const ScoreTile each : {ScoreTile{1, 1}, {2, 2}, {3, 3}, {2, 4}, {4, 4}}) {
    for_small([&](const Band& band, const Lengths& n) {
      for (int j = 0; j <= count_of(9, each.keys); ++j) {
        const RowTiles rows = row_tiles(band, n, each.rows, j * each.keys, each.keys);
        for (int i = 0; i * each.rows < n.sq; ++i) {
          const KeyTiles keys = key_tiles_of(band, n, each, i);
          const bool meet = meets(band, n, each, i, j);
          ASSERT_EQ(i >= rows.begin && i < rows.end, meet) << text(band, n) << i << " " << j;
          ASSERT_EQ(j >= keys.begin && j < keys.end, meet) << text(band, n) << i << " " << j;
        }
        ASSERT_LE(rows.end, count_of(n.sq, each.rows)) << text(band, n);
      }
    });
  }
}

// The two directions of the mask: rows see keys, and keys are seen by rows.
TEST(BackwardWork, RowsSeeingAKey) {
  for_small([&](const Band& band, const Lengths& n) {
    for (int key = 0; key < n.sk; ++key) {
      const RowRange rows = rows_seeing(band, n, key);
      for (int row = 0; row < n.sq; ++row) {
        const bool seen =
            (!band.has_right || row >= rows.begin) && (!band.has_left || row < rows.end);
        ASSERT_EQ(seen, sees(band, n, row, key)) << text(band, n) << row << " " << key;
      }
    }
  });
}

TEST(BackwardWork, ATileIsFullWhereEveryScoreIsVisible) {
  int all = 0;
  for_small([&](const Band& band, const Lengths& n) {
    for (const int rows : {1, 2, 4}) {
      for (const int keys : {1, 2, 4}) {
        for (int row = 0; row < n.sq; row += rows) {
          for (int key = 0; key < n.sk; key += keys) {
            bool want = key + keys <= n.sk;
            for (int i = row; i < std::min(row + rows, n.sq); ++i) {
              for (int j = key; j < key + keys; ++j) want = want && sees(band, n, i, j);
            }
            const int last = std::min(row + rows, n.sq) - 1;
            const KeyRange seen = keys_seen_by_all(band, n, row, last);
            ASSERT_EQ(is_partial(seen, key, key + keys), !want) << text(band, n) << row;
            const KeyTiles full = full_key_tiles(band, n, keys, row, last);
            ASSERT_EQ(key / keys >= full.begin && key / keys < full.end, want)
                << text(band, n) << row;
            all += want;
          }
        }
      }
    }
  });
  EXPECT_GT(all, 1000);
}

TEST(BackwardWork, SumOfQuotients) {
  for (const int each : {1, 2}) {
    for (const int limit : {0, 1, 3, 8}) {
      long long sum = 0;
      EXPECT_EQ(sum_of_quotients(-3, each, limit), 0);
      for (int x = 0; x < 40; ++x) {
        if (x > 0) sum += std::min((x + each - 1) / each, limit);
        EXPECT_EQ(sum_of_quotients(x, each, limit), sum) << x << " " << each << " " << limit;
      }
    }
  }
}

// Under a right bound alone a row tile has room for the score tiles before its diagonal: for all
// that it sees, and for no more than the next row tile sees.
TEST(BackwardWork, TilesAboveTheDiagonalHaveRoom) {
  for (const ScoreTile each : {ScoreTile{2, 2}, {3, 3}, {2, 4}}) {
    for_small([&](const Band& band, const Lengths& n) {
      if (!band.has_right || band.has_left) return;
      ASSERT_EQ(tiles_above_diagonal(band, n, each, 0), 0);
      for (int i = 0; i < count_of(n.sq, each.rows); ++i) {
        const long long room =
            tiles_above_diagonal(band, n, each, i + 1) - tiles_above_diagonal(band, n, each, i);
        ASSERT_GE(room, key_tiles_of(band, n, each, i).end) << text(band, n) << i;
        const int diagonal = diagonal_of(band, n, (i + 2) * each.rows - 1) + band.right;
        ASSERT_LE(room, std::clamp(count_of(std::max(diagonal, 0) + 1, each.keys), 0,
                                   count_of(n.sk, each.keys)))
            << text(band, n) << i;
      }
    });
  }
}

// Each block is taken once, those of a head in ascending or descending order; alternating orders
// have the other order in every second section.
TEST(BackwardWork, EveryBlockIsTakenOnce) {
  const auto check = [](const BlockSchedule& all) {
    std::map<int, std::vector<int>> taken;  // blocks of a head
    std::vector<int> first;  // heads in the order in which their first block is taken
    int outermost = 0;       // blocks taken before of the heads of a section
    for (int number = 0; number < all.blocks * all.batch_heads; ++number) {
      const BlockOfHead at = block_of(all, number);
      ASSERT_TRUE(at.batch_head >= 0 && at.batch_head < all.batch_heads);
      std::vector<int>& of_head = taken[at.batch_head];
      if (of_head.empty()) first.push_back(at.batch_head);
      const int count = static_cast<int>(of_head.size());
      if (count > 0) {
        ASSERT_GE(count, outermost);  // inside a section blocks are outermost
      }
      outermost = count;
      of_head.push_back(at.block);
    }
    ASSERT_EQ(static_cast<int>(taken.size()), all.batch_heads);
    ASSERT_TRUE(std::ranges::is_sorted(first));
    for (auto& [head, of_head] : taken) {
      const bool second = std::min(head / all.section_heads, all.sections - 1) % 2 == 1;
      const bool ascending = all.order == kAscending || (all.order == kAlternating && second);
      ASSERT_EQ(is_ascending(all, head), ascending);
      if (!ascending) std::ranges::reverse(of_head);
      for (int block = 0; block < all.blocks; ++block) ASSERT_EQ(of_head.at(block), block);
    }
  };
  for (const BlockOrder order : {kAscending, kDescending, kAlternating}) {
    for (int blocks = 1; blocks <= 9; ++blocks) {
      for (int heads = 1; heads <= 9; ++heads) {
        for (int section = 1; section <= heads; ++section) {
          for (int sections = 1; sections <= heads / section; ++sections) {
            check({blocks, heads, section, sections, order});
          }
        }
      }
    }
  }
}

// Each row tile of each block is in one work tile. First parts come before all others and are never
// empty; second parts come after them, the longer ones first.
TEST(BackwardWork, EveryRowTileIsInOneWorkTile) {
  for (int heads = 1; heads <= 5; ++heads) {
    const BlockSchedule blocks = {7, heads, std::min(heads, 2), std::max(heads / 2, 1), kAscending};
    const int all = blocks.blocks * heads;
    for (int cut = 0; cut <= all; ++cut) {
      for (const int tiles : {1, 2, 5, 64}) {
        std::vector<std::vector<int>> times(all, std::vector<int>(tiles));
        std::vector<int> next(all);  // the tile at which a block goes on
        int seconds = 0, max_left = tiles;
        ASSERT_EQ(work_tiles_of(blocks, cut), all + cut);
        for (int work_tile = 0; work_tile < work_tiles_of(blocks, cut); ++work_tile) {
          const int number = block_number(blocks, cut, work_tile);
          const RowTiles of = row_tiles_of_work_tile(blocks, cut, work_tile, tiles);
          const bool first = is_first_part(cut, work_tile),
                     second = is_second_part(blocks, cut, work_tile);
          ASSERT_EQ(first, work_tile < cut);
          ASSERT_EQ(first || second, number >= all - cut);
          ASSERT_FALSE(first && second);
          ASSERT_EQ(of.begin, next.at(number));
          ASSERT_TRUE(of.begin < of.end || (second && of.begin == tiles));
          ASSERT_TRUE(first || of.end == tiles);
          if (second) {
            ASSERT_LE(of.end - of.begin, max_left);
            max_left = of.end - of.begin;
            ++seconds;
          }
          next.at(number) = of.end;
          for (int tile = of.begin; tile < of.end; ++tile) ++times.at(number).at(tile);
        }
        ASSERT_EQ(seconds, cut);
        for (const std::vector<int>& of_block : times)
          for (const int count : of_block) ASSERT_EQ(count, 1);
      }
    }
  }
}

// CTAs that take work tiles in their order end within a row tile of each other.
TEST(BackwardWork, WorkTilesEndTogether) {
  for (const int ctas : {2, 5, 33, 132}) {
    for (int number = 2 * ctas; number < 4 * ctas; ++number) {
      const BlockSchedule blocks = {number, 1, 1, 1, kAscending};
      const int cut = ctas - 1;
      for (const int tiles : {1, 7, 64, 256}) {
        std::multiset<int> free;
        for (int i = 0; i < ctas; ++i) free.insert(0);
        std::vector<int> end_of_first(number);
        for (int work_tile = 0; work_tile < work_tiles_of(blocks, cut); ++work_tile) {
          const RowTiles of = row_tiles_of_work_tile(blocks, cut, work_tile, tiles);
          const int at = block_number(blocks, cut, work_tile), begin = *free.begin();
          if (is_second_part(blocks, cut, work_tile)) {
            ASSERT_LE(end_of_first.at(at), begin) << "it would wait";
          }
          free.erase(free.begin());
          free.insert(begin + of.end - of.begin);
          if (is_first_part(cut, work_tile)) end_of_first.at(at) = begin + of.end - of.begin;
        }
        ASSERT_LE(*free.rbegin(), count_of(number * tiles, ctas) + 1);
      }
    }
  }
}

// The statistics of packed sequences of any lengths, in a tensor with padding after them.
TEST(BackwardWork, StatisticsOfSequencesLieApart) {
  const std::vector<std::vector<int>> lengths = {
      {1, 1, 1}, {0, 0, 0}, {128, 128, 1}, {127, 129, 0, 1}, {300, 1, 0, 0, 77}, {1000, 128}};
  for (const std::vector<int>& each : lengths) {
    int start = 0, end = 0;
    for (int b = 0; b < static_cast<int>(each.size()); ++b) {
      const Lengths n{start, 0, each[b], 0};
      const int first = statistics_row(n, true, b, 1000);
      EXPECT_EQ(first % kStatisticsRows, 0);
      EXPECT_GE(first, end);
      end = first + count_of(each[b], kStatisticsRows) * kStatisticsRows;
      start += each[b];
    }
    const int batch = static_cast<int>(each.size());
    EXPECT_LE(end, (start / kStatisticsRows + batch + 1) * kStatisticsRows);
  }
  for (const int longest : {1, 128, 129, 1000}) {
    for (int b = 0; b < 4; ++b) {
      const int room = count_of(longest, kStatisticsRows) * kStatisticsRows;
      EXPECT_EQ(statistics_row({0, 0, longest, 1}, false, b, longest), b * room);
      EXPECT_GE(room, longest);
    }
  }
}

struct Region {
  int begin, bytes, alignment;
};

/// They do not overlap, are aligned, and end where the map does.
void check_apart(std::vector<Region> regions, int bytes) {
  std::ranges::sort(regions, {}, &Region::begin);
  int end = 0;
  for (const Region& r : regions) {
    if (r.bytes == 0) continue;
    ASSERT_EQ(r.begin % r.alignment, 0);
    ASSERT_GE(r.begin, end) << "overlaps what is before it";
    end = r.begin + r.bytes;
  }
  ASSERT_EQ(end, bytes);
}

std::vector<Region> copies(int begin, int bytes, int count, int alignment) {
  std::vector<Region> all;
  for (int i = 0; i < count; ++i) all.push_back({begin + i * bytes, bytes, alignment});
  return all;
}

constexpr Operands kTypes = {kBF16, kBF16, kBF16, kBF16};

TEST(BackwardLayout, BuffersOfKeysAreAlignedAndApart) {
  for (const int d : {16, 64, 80, 128, 144, 256}) {
    for (const int dv : {16, 64, 128, 256}) {
      for (const int dq_stages : {0, 2, 3}) {
        for (const bool wide : {false, true}) {
          if (wide && dq_stages > 0) continue;
          const int rows = d <= 64 && !wide ? 128 : 64;
          const int keys = wide ? 64 : 128;
          const int k_stages = rows == 128 ? 2 : 1;
          const BackwardTile tile{kTypes, d, dv, 2, rows, keys, k_stages, 3, 2, 2, 1, 2, dq_stages};
          const KeysLayout map = wide ? keys_wide_layout(tile) : keys_layout(tile);
          // 64 columns are a panel, 128 bytes of each row; two of them may be in registers.
          const auto panels = [&](int dim, int of) {
            return std::max(0, (dim + 63) / 64 - of) * 128;
          };
          std::vector<Region> regions;
          const auto add = [&](int begin, int bytes, int count, int alignment) {
            const std::vector<Region> more = copies(begin, bytes, count, alignment);
            regions.insert(regions.end(), more.begin(), more.end());
          };
          add(map.k, keys * panels(d, wide ? 2 : 0), k_stages, 1024);
          add(map.v, keys * panels(dv, wide ? 2 : 0), 1, 1024);
          add(map.q, rows * panels(d, 0), 3, 1024);
          add(map.o, rows * panels(dv, 0), 2, 1024);
          add(map.p, 2 * rows * keys, wide ? 2 : 0, 16);
          add(map.ds, rows * 64 * 2, 2 * (keys / 64), 1024);
          add(map.dq, 64 * 64 * 4, dq_stages, 128);
          add(map.shift, 4 * rows, 3, 16);
          add(map.delta, 4 * rows, 2, 16);
          add(map.step, sizeof(Step), 3, 16);
          add(map.ds_step, sizeof(Step), 2, 16);
          add(map.block, sizeof(KeyBlock), k_stages, 16);
          add(map.dq_tile, sizeof(DqTile), dq_stages, 16);
          for (const int barrier : {map.v_full, map.v_empty, map.tail, map.dropout_key})
            add(barrier, 8, 1, 8);
          for (const int barrier : {map.k_full, map.k_empty}) add(barrier, 8, k_stages, 8);
          for (const int barrier : {map.q_full, map.q_empty}) add(barrier, 8, 3, 8);
          for (const int barrier : {map.o_full, map.o_empty}) add(barrier, 8, 2, 8);
          add(map.complete, 4, dq_stages, 4);
          check_apart(regions, map.bytes);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(BackwardLayout, BuffersOfRowsAreAlignedAndApart) {
  for (const int d : {16, 64, 128, 256}) {
    for (const int tiles : {1, 2, 4}) {
      const RowsLayout map = rows_layout({kTypes, d, d, 2, 64, 128, 1, 2, 2, 2, tiles, 3, 0});
      std::vector<Region> regions;
      for (int stage = 0; stage < 3; ++stage) {
        const int at = map.stages + stage * map.stage_bytes;
        const int ds = 2 * tiles * 64 * 64 * 2;
        regions.push_back({at, ds, 1024});
        regions.push_back({at + ds, (d + 63) / 64 * 64 * 128, 1024});
      }
      regions.push_back({map.block, sizeof(RowBlock), 16});
      for (int i = 0; i < 3; ++i) {
        regions.push_back({map.full + 8 * i, 8, 8});
        regions.push_back({map.empty + 8 * i, 8, 8});
      }
      for (const int barrier : {map.block_full, map.block_empty, map.tail})
        regions.push_back({barrier, 8, 8});
      check_apart(regions, map.bytes);
    }
  }
}

}  // namespace
}  // namespace fulgur::kernels
