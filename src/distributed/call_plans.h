/// The plans of a group's calls that were made without one, so that a call like an earlier one asks
/// only whether all ranks have its plan.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>

#include "fulgur/attention.h"
#include "fulgur/distributed/plan.h"

namespace fulgur::distributed {

/// All that a plan of a call on this rank depends on, as bytes. `Args`: ForwardArgs, BackwardArgs.
template <class Args>
std::string key_of(const Args& args, const Options& options, const Distribution& distribution);

/// A plan, and its number among what the ranks have agreed about, which they count alike: those who
/// have the same one have planned together.
struct NumberedPlan {
  uint64_t number = 0;
  DistributedPlan plan;
};

/// The latest ones.
class CallPlans {
 public:
  std::optional<NumberedPlan> find(const std::string& key);
  void keep(std::string key, NumberedPlan plan);

 private:
  struct Entry {
    std::string key;
    NumberedPlan plan;
  };
  std::list<Entry> entries_;  ///< the last used first
};

}  // namespace fulgur::distributed
