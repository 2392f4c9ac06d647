#pragma once

#include <mutex>

namespace fulgur {

/// A mutex that is free in a child of fork(). Only the thread that forks lives on in the child: a
/// plain mutex that another thread held stays locked there forever. fork() therefore waits until
/// it holds every ForkMutex, and parent and child release them, so that what they guard is whole.
/// A section under one is short: fork() waits for it. A ForkMutex lives as long as the process.
class ForkMutex {
 public:
  ForkMutex();
  ~ForkMutex() = default;
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace fulgur
