// Which rows a rank has.
#include <gtest/gtest.h>

#include <algorithm>

#include "call/mask.h"
#include "engines.h"
#include "fulgur/distributed/plan.h"

namespace fulgur::test {
namespace {

TEST(RowsOf, CoverAllOnceAndShareOutEvenly) {
  const auto area = [](const std::vector<int64_t>& rows, int64_t length) {
    double sum = 0;
    for (const int64_t row : rows) {
      const auto keys = visible_keys(causal(), {0, 0, length, length}, row);
      sum += static_cast<double>(keys.end - keys.begin);
    }
    return sum;
  };
  for (const Sharding sharding : {Sharding::kContiguous, Sharding::kZigzag, Sharding::kByArea}) {
    for (const int64_t length : {0, 1, 64, 100, 1000, 8192}) {
      for (const int ranks : {1, 2, 3, 4, 8, 1000}) {
        std::vector<int> seen(length);
        double most = 0, all = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const auto rows = rows_of(sharding, length, ranks, rank);
          ASSERT_TRUE(std::ranges::is_sorted(rows));
          for (size_t i = 0; i < rows.size(); ++i) {
            ++seen[rows[i]];
            if (i == 0 || rows[i] != rows[i - 1] + 1) {
              ASSERT_EQ(rows[i] % 64, 0);
            }
          }
          most = std::max(most, area(rows, length));
          all += area(rows, length);
        }
        ASSERT_TRUE(std::ranges::all_of(seen, [](int n) { return n == 1; })) << length << " rows";
        if (sharding != Sharding::kContiguous && length == 8192 && ranks <= 8) {
          EXPECT_LE(most * ranks, 1.13 * all) << ranks << " ranks";
        }
      }
    }
  }
}

TEST(RowsOf, DocumentsByArea) {
  const std::vector<int32_t> cu = {5, 3000, 3001, 3001, 9000, 9700, 16389};
  std::vector<double> load;
  std::vector<int> seen(cu.back());
  for (int rank = 0; rank < 4; ++rank) {
    load.push_back(0);
    for (const int64_t row : rows_of(Sharding::kByArea, cu, 4, rank)) {
      ++seen[row];
      const auto next = std::ranges::upper_bound(cu, static_cast<int32_t>(row));
      load.back() += static_cast<double>(row - *(next - 1) + 1);
    }
  }
  for (size_t row = 0; row < seen.size(); ++row) ASSERT_EQ(seen[row], row >= 5 ? 1 : 0);
  EXPECT_LE(*std::ranges::max_element(load), 1.1 * *std::ranges::min_element(load));
}

TEST(RowsOf, Errors) {
  const auto says = [](auto... args) {
    return message_of([&] { rows_of(Sharding::kZigzag, args...); });
  };
  EXPECT_EQ(says(int64_t{64}, 0, 0), "ranks: got 0, want at least 1");
  EXPECT_EQ(says(int64_t{64}, 2, 2), "rank: got 2, want 0 to 1");
  EXPECT_EQ(says(int64_t{-1}, 2, 0), "length: got -1, want >= 0");
  EXPECT_EQ(says(std::vector<int32_t>{0, 5, 3}, 2, 0),
            "cu_seqlens: decreases, want non-decreasing");
}

}  // namespace
}  // namespace fulgur::test
