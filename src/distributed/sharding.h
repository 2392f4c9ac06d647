/// How rows of sequences are distributed among ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fulgur/distributed/plan.h"

namespace fulgur::distributed {

/// Rows [begin, end) of a sequence on a rank. `place`: the index of the first one among all rows of
/// the rank.
struct RowRun {
  int64_t sequence, begin, end, place;
  int64_t size() const { return end - begin; }
};

/// The rows of all ranks.
class Rows {
 public:
  Rows() = default;
  /// `ends`: the first row of each sequence among all rows, and the end of the last sequence.
  Rows(Sharding sharding, std::vector<int64_t> ends, int ranks, const Mask& mask);

  const std::vector<RowRun>& of(int rank) const { return runs_[rank]; }
  int64_t count(int rank) const;
  int64_t total() const { return ends_.back() - ends_.front(); }
  int64_t sequences() const { return std::ssize(ends_) - 1; }
  int64_t begin(int64_t sequence) const { return ends_[sequence] - ends_.front(); }
  int64_t length(int64_t sequence) const { return ends_[sequence + 1] - ends_[sequence]; }
  /// The index of the first row of a run among all rows.
  int64_t row(const RowRun& run) const { return begin(run.sequence) + run.begin; }

 private:
  std::vector<int64_t> ends_;
  std::vector<std::vector<RowRun>> runs_;  // of each rank, ordered by rows
};

}  // namespace fulgur::distributed
