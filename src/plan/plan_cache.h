#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/fork_mutex.h"
#include "plan/plan.h"

namespace fulgur {

/// A cache of the plans of calls that were made without a plan: the latest ones, keyed by all that
/// a plan depends on. It lives as long as the process.
class PlanCache {
 public:
  /// All that a plan depends on. Calls with equal keys have the same plan.
  struct Key {
    Problem problem;
    std::string engine;  ///< as Options says
    int threads = 0;     ///< that the CPU would use now
    bool operator==(const Key&) const = default;
  };

  explicit PlanCache(size_t max_plans) : max_plans_(max_plans) {}

  /// The plan of a key; null if the cache has none, or an outdated one.
  std::shared_ptr<const Plan::Impl> find(const Key& key);
  void keep(const Key& key, std::shared_ptr<const Plan::Impl> plan);

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const Plan::Impl> plan;
  };
  struct HashOfKey {
    size_t operator()(const Key& key) const { return HashOfProblem()(key.problem); }
  };

  size_t max_plans_;
  ForkMutex mutex_;
  std::list<Entry> entries_;  ///< the last used first
  std::unordered_map<Key, std::list<Entry>::iterator, HashOfKey> by_key_;
};

}  // namespace fulgur
