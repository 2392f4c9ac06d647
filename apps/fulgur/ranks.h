#pragma once

#include <functional>
#include <string>
#include <vector>

#include "workload/workload.h"

namespace fulgur::app {

/// Processes of this machine that compute cases together, each a rank with a part of the threads,
/// or with a GPU. They are forked: the process must not have had threads or a GPU before.
class RankProcesses {
 public:
  /// `cases`: of all threads, or of the first GPU.
  RankProcesses(int ranks, const std::vector<bench::Case>& cases);
  ~RankProcesses();
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// The next case, from now on.
  void next();
  /// Seconds of a call, the median of some runs. Throws where a process has failed.
  double seconds(int runs);

 private:
  void send_order(int what);

  std::vector<int> pids_;
  std::vector<int> orders_;  ///< where ranks read what to do
  int answers_ = -1;         ///< where rank 0 says what it has measured
};

}  // namespace fulgur::app
