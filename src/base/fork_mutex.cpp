#include "base/fork_mutex.h"

#include <pthread.h>

#include <thread>
#include <vector>

namespace fulgur {
namespace {

/// Every ForkMutex of the process.
struct Registry {
  std::mutex mutex;  // of the list; fork() holds it, too
  std::vector<ForkMutex*> all;

  Registry() { pthread_atfork(hold_all, release_all, release_all); }

  static Registry& here() {
    static Registry& kHere = *new Registry;  // threads may compute while the process ends
    return kHere;
  }

  /// Holds the first mutexes up to one that is taken; false if there is such a one. Whoever holds it
  /// may wait for one of the others: to wait for it while they are held could be forever.
  bool try_hold_all() {
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i]->try_lock()) continue;
      while (i-- > 0) all[i]->unlock();
      return false;
    }
    return true;
  }

  static void hold_all() {
    here().mutex.lock();
    while (!here().try_hold_all()) std::this_thread::yield();
  }
  static void release_all() {
    for (ForkMutex* mutex : here().all) mutex->unlock();
    here().mutex.unlock();
  }
};

}  // namespace

ForkMutex::ForkMutex() {
  Registry& registry = Registry::here();
  const std::scoped_lock lock(registry.mutex);
  registry.all.push_back(this);
}

}  // namespace fulgur
