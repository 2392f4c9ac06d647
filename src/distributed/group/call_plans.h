/// A cache of the plans of calls that a group makes without a plan. For a call like an earlier one
/// the ranks only agree that all of them have its plan.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>

#include "fulgur/attention.h"
#include "fulgur/distributed/plan.h"

namespace fulgur::distributed {

/// Everything that the plan of a call on this rank depends on, as bytes. `Args`: ForwardArgs or
/// BackwardArgs.
template <class Args>
std::string key_of(const Args& args, const Options& options, const Distribution& distribution);

/// A plan and the number of the agreement of all ranks in which it was made. All ranks count
/// agreements alike, so plans of the same number belong together.
struct NumberedPlan {
  uint64_t number = 0;
  DistributedPlan plan;
};

/// The plans that were used last.
class CallPlans {
 public:
  std::optional<NumberedPlan> find(const std::string& key);
  void keep(std::string key, NumberedPlan plan);

 private:
  struct Entry {
    std::string key;
    NumberedPlan plan;
  };
  std::list<Entry> entries_;  ///< in the order of their last use, the latest first
};

}  // namespace fulgur::distributed
