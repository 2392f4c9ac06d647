#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace fulgur {

/// A mutex that is free in a child of fork(). Only the thread that forks lives on in the child: a
/// plain mutex that another thread held stays locked there forever. fork() therefore waits until
/// it holds every ForkMutex, and parent and child release them, so that what they guard is whole.
/// The thread that forks keeps those that it holds: it goes on with its sections in both processes.
/// A ForkMutex lives as long as the process, and needs no initialization at run time.
class ForkMutex {
 public:
  constexpr ForkMutex() = default;
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() {
    if (!listed_.load(std::memory_order_acquire)) list();
    mutex_.lock();
    owner_.store(pthread_self(), std::memory_order_relaxed);
  }
  void unlock() {
    owner_.store(pthread_t{}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  friend struct ForkMutexes;

  void list();

  std::mutex mutex_;
  std::atomic<pthread_t> owner_ = pthread_t{};
  std::atomic<bool> listed_ = false;  ///< fork() knows it
  bool held_by_fork_ = false;
  ForkMutex* next_ = nullptr;  ///< of those that fork() knows
};

/// A value that is made once, at first use, for static variables. The guard of a function's static
/// stays locked in a child of fork() where another thread was making the value; fork() waits for a
/// MadeOnce. It is never destroyed, as threads may compute while the process ends.
template <class T>
class MadeOnce {
 public:
  template <class Make>
  T& get(const Make& make) {
    if (T* made = made_.load(std::memory_order_acquire); made != nullptr) return *made;
    const std::scoped_lock lock(making_);
    if (made_.load(std::memory_order_relaxed) == nullptr) {
      made_.store(new T(make()), std::memory_order_release);
    }
    return *made_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<T*> made_ = nullptr;
  ForkMutex making_;
};

}  // namespace fulgur
