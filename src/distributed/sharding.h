/// Which rank has which rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fulgur/distributed/plan.h"

namespace fulgur::distributed {

/// Rows [begin, end) of a sequence that a rank has, and the first one's place among all of its
/// rows.
struct RowRun {
  int64_t sequence, begin, end, place;
  int64_t size() const { return end - begin; }
};

/// The rows of all ranks.
class Rows {
 public:
  Rows() = default;
  /// `ends`: where sequences begin among all rows, and where the last one ends.
  Rows(Sharding sharding, std::vector<int64_t> ends, int ranks, const Mask& mask);

  const std::vector<RowRun>& of(int rank) const { return runs_[rank]; }
  int64_t count(int rank) const;
  int64_t total() const { return ends_.back() - ends_.front(); }
  int64_t sequences() const { return std::ssize(ends_) - 1; }
  int64_t begin(int64_t sequence) const { return ends_[sequence] - ends_.front(); }
  int64_t length(int64_t sequence) const { return ends_[sequence + 1] - ends_[sequence]; }
  /// Where a run begins among all rows.
  int64_t row(const RowRun& run) const { return begin(run.sequence) + run.begin; }

 private:
  std::vector<int64_t> ends_;
  std::vector<std::vector<RowRun>> runs_;  // of each rank, in the order of rows
};

}  // namespace fulgur::distributed
