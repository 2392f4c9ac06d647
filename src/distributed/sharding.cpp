#include "distributed/sharding.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "call/mask.h"
#include "distributed/group/group.h"

namespace fulgur::distributed {
namespace {

constexpr int64_t kStrip = 64;  // boundaries between ranks are at multiples of kStrip rows
constexpr int64_t kRunsOfRank =
    16;  // runs per rank with kByArea: more runs balance the load better

struct Strip {
  int64_t sequence, begin, end;
};

std::vector<Strip> strips_of(const std::vector<int64_t>& ends) {
  std::vector<Strip> strips;
  for (size_t s = 0; s + 1 < ends.size(); ++s) {
    const int64_t length = ends[s + 1] - ends[s];
    for (int64_t begin = 0; begin < length; begin += kStrip) {
      strips.push_back({static_cast<int64_t>(s), begin, std::min(length, begin + kStrip)});
    }
  }
  return strips;
}

/// The part of each strip, if all strips are divided into `parts` equal parts.
std::vector<int> parts_of(size_t strips, int parts) {
  std::vector<int> part(strips);
  for (size_t i = 0; i < strips; ++i) part[i] = static_cast<int>(i * parts / strips);
  return part;
}

/// Assigns runs of strips, by decreasing area, each to the rank with the smallest load so far.
std::vector<int> ranks_by_area(const std::vector<Strip>& strips, const std::vector<int64_t>& ends,
                               int ranks, const Mask& mask) {
  struct Run {
    size_t begin, end;
    double area;
  };
  const size_t longest = std::max<size_t>(1, strips.size() / (kRunsOfRank * ranks));
  std::vector<Run> runs;
  for (size_t i = 0; i < strips.size(); ++i) {
    const Strip& strip = strips[i];
    if (runs.empty() || strip.begin == 0 || i - runs.back().begin == longest) {
      runs.push_back({i, i, 0});
    }
    const int64_t length = ends[strip.sequence + 1] - ends[strip.sequence];
    for (int64_t row = strip.begin; row < strip.end; ++row) {
      const KeyRange keys = visible_keys(mask, {0, 0, length, length}, row);
      runs.back().area += static_cast<double>(keys.end - keys.begin);
    }
    runs.back().end = i + 1;
  }
  std::ranges::stable_sort(runs, std::greater<>(), &Run::area);
  std::vector<double> load(ranks, 0.0);
  std::vector<int> rank(strips.size());
  for (const Run& run : runs) {
    const auto smallest = std::ranges::min_element(load);
    *smallest += run.area;
    std::fill(rank.begin() + run.begin, rank.begin() + run.end,
              static_cast<int>(smallest - load.begin()));
  }
  return rank;
}

std::vector<int> ranks_of(Sharding sharding, const std::vector<Strip>& strips,
                          const std::vector<int64_t>& ends, int ranks, const Mask& mask) {
  if (sharding == Sharding::kByArea) return ranks_by_area(strips, ends, ranks, mask);
  if (sharding == Sharding::kContiguous) return parts_of(strips.size(), ranks);
  std::vector<int> part = parts_of(strips.size(), 2 * ranks);
  for (int& one : part) one = std::min(one, 2 * ranks - 1 - one);
  return part;
}

}  // namespace

Rows::Rows(Sharding sharding, std::vector<int64_t> ends, int ranks, const Mask& mask)
    : ends_(std::move(ends)), runs_(ranks) {
  const std::vector<Strip> strips = strips_of(ends_);
  const std::vector<int> rank = ranks_of(sharding, strips, ends_, ranks, mask);
  for (size_t i = 0; i < strips.size(); ++i) {
    const Strip& strip = strips[i];
    std::vector<RowRun>& runs = runs_[rank[i]];
    if (strip.begin > 0 && rank[i - 1] == rank[i]) {
      runs.back().end = strip.end;
      continue;
    }
    const int64_t place = runs.empty() ? 0 : runs.back().place + runs.back().size();
    runs.push_back({strip.sequence, strip.begin, strip.end, place});
  }
}

int64_t Rows::count(int rank) const {
  const std::vector<RowRun>& runs = runs_[rank];
  return runs.empty() ? 0 : runs.back().place + runs.back().size();
}

}  // namespace fulgur::distributed

namespace fulgur {
namespace {

std::vector<int64_t> rows_of(Sharding sharding, std::vector<int64_t> ends, int ranks, int rank,
                             const Mask& mask) {
  if (sharding == Sharding::kByPage) {
    fail("sharding", "got by_page, which shares out pages of caches, want one of rows");
  }
  distributed::check_rank(rank, ranks);
  const int64_t first = ends.front();
  const distributed::Rows all(sharding, std::move(ends), ranks, mask);
  std::vector<int64_t> rows;
  for (const distributed::RowRun& run : all.of(rank)) {
    rows.resize(rows.size() + run.size());
    std::iota(rows.end() - run.size(), rows.end(), first + all.row(run));
  }
  return rows;
}

}  // namespace

std::vector<int64_t> rows_of(Sharding sharding, int64_t length, int ranks, int rank,
                             const Mask& mask) {
  if (length < 0) fail("length", "got {}, want >= 0", length);
  return rows_of(sharding, std::vector<int64_t>{0, length}, ranks, rank, mask);
}

std::vector<int64_t> rows_of(Sharding sharding, std::span<const int32_t> cu_seqlens, int ranks,
                             int rank, const Mask& mask) {
  if (cu_seqlens.empty()) fail("cu_seqlens", "got none, want (batch + 1)");
  if (!std::ranges::is_sorted(cu_seqlens)) fail("cu_seqlens", "decreases, want non-decreasing");
  return rows_of(sharding, std::vector<int64_t>(cu_seqlens.begin(), cu_seqlens.end()), ranks, rank,
                 mask);
}

}  // namespace fulgur
