#include "base/fork_mutex.h"

#include <thread>

namespace fulgur {

/// All mutexes of the process that were ever locked.
struct ForkMutexes {
  static constinit std::mutex mutex;  ///< of the list
  static constinit ForkMutex* first;

  /// Holds all but those of this thread; false, and holds none, where another thread has one. That
  /// thread may wait for another one: to wait for it while others are held could be forever.
  static bool try_hold_all() {
    mutex.lock();
    for (ForkMutex* m = first; m != nullptr; m = m->next_) {
      if (pthread_equal(m->owner_.load(std::memory_order_relaxed), pthread_self()) != 0) continue;
      m->held_by_fork_ = m->mutex_.try_lock();
      if (m->held_by_fork_) continue;
      release_all();
      return false;
    }
    return true;
  }
  static void hold_all() {
    while (!try_hold_all()) std::this_thread::yield();
  }
  static void release_all() {
    for (ForkMutex* m = first; m != nullptr; m = m->next_) {
      if (m->held_by_fork_) m->mutex_.unlock();
      m->held_by_fork_ = false;
    }
    mutex.unlock();
  }

  /// Registers the handlers of fork() before any thread can lock a mutex.
  [[gnu::constructor]] static void watch_forks() {
    pthread_atfork(hold_all, release_all, release_all);
  }
};

constinit std::mutex ForkMutexes::mutex;
constinit ForkMutex* ForkMutexes::first = nullptr;

void ForkMutex::list() {
  const std::scoped_lock lock(ForkMutexes::mutex);
  if (listed_.load(std::memory_order_relaxed)) return;
  next_ = ForkMutexes::first;
  ForkMutexes::first = this;
  listed_.store(true, std::memory_order_release);
}

}  // namespace fulgur
