#include "plan/plan_cache.h"

#include <mutex>

namespace fulgur {

std::shared_ptr<const Plan::Impl> PlanCache::find(const Key& key) {
  const std::scoped_lock lock(mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  const auto entry = found->second;
  if (entry->plan->generation != entry->plan->engine->generation()) {
    by_key_.erase(found);
    entries_.erase(entry);
    return nullptr;
  }
  entries_.splice(entries_.begin(), entries_, entry);
  return entry->plan;
}

void PlanCache::keep(const Key& key, std::shared_ptr<const Plan::Impl> plan) {
  const std::scoped_lock lock(mutex_);
  if (by_key_.contains(key)) return;  // another thread has inserted the same plan
  entries_.push_front({key, std::move(plan)});
  by_key_.emplace(key, entries_.begin());
  if (entries_.size() <= max_plans_) return;
  by_key_.erase(entries_.back().key);
  entries_.pop_back();
}

}  // namespace fulgur
