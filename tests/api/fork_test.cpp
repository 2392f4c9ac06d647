// Children of fork(): they have what other threads held, and none of those threads.
#include <gtest/gtest.h>
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork_mutex.h"
#include "fulgur/fulgur.h"

namespace fulgur {
namespace {

using std::chrono::milliseconds;

// Whether a child finishes `body` with true. An alarm ends one that waits forever.
bool child_succeeds(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body() ? 0 : 1);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// Attention of `rows` rows of ones, which is ones.
bool computes(int64_t rows, int threads) {
  const std::vector<int64_t> shape = {1, rows, 2, 8};
  const std::vector<float> x(rows * 16, 1.0f);
  std::vector<float> out(x.size());
  const ConstTensor in = ConstTensor::contiguous(x.data(), DType::kF32, shape);
  Options options;
  options.threads = threads;
  forward({.q = in, .k = in, .v = in, .out = Tensor::contiguous(out.data(), DType::kF32, shape)},
          options);
  return std::all_of(out.begin(), out.end(), [](float y) { return std::abs(y - 1) < 1e-5f; });
}

TEST(Fork, WhileOtherThreadsCompute) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&stop, t] {  // of many shapes: plans are made, found and forgotten
      for (int64_t n = t; !stop; ++n) computes(1 + 7 * n % 2000, 1);
    });
  }
  int failed = 0;
  for (int i = 0; i < 300 && failed == 0; ++i) {
    failed += !child_succeeds([] { return computes(5, 1); });
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
}

// As docs/contract.md says.
TEST(Fork, ChildrenHaveThreadsWhereTheParentPausedItsOwn) {
  ASSERT_TRUE(computes(500, 2));
  ASSERT_EQ(omp_pause_resource_all(omp_pause_hard), 0);
  EXPECT_TRUE(child_succeeds([] { return computes(500, 2); }));
  EXPECT_TRUE(computes(500, 2));
}

TEST(ForkMutex, IsFreeInAChild) {
  static constinit ForkMutex mutex;
  std::atomic<bool> held = false;
  std::thread other([&] {
    const std::scoped_lock lock(mutex);
    held = true;
    std::this_thread::sleep_for(milliseconds(50));
  });
  while (!held) std::this_thread::yield();
  EXPECT_TRUE(child_succeeds([] {
    const std::scoped_lock lock(mutex);
    return true;
  }));
  other.join();
}

TEST(ForkMutex, StaysWithTheThreadThatForks) {
  static constinit ForkMutex mutex;
  {
    const std::scoped_lock lock(mutex);  // as a driver may fork() while it is loaded
    EXPECT_TRUE(child_succeeds([] {
      mutex.unlock();
      mutex.lock();
      return true;
    }));
  }
  const std::scoped_lock lock(mutex);
}

// fork() may not hold what the other thread waits for.
TEST(ForkMutex, OfAThreadThatLocksAnother) {
  static constinit ForkMutex known, outer, fresh;
  { const std::scoped_lock lock(known); }  // fork() knows it
  std::atomic<bool> held = false;
  std::thread other([&] {
    const std::scoped_lock lock(outer);
    held = true;
    std::this_thread::sleep_for(milliseconds(50));
    const std::scoped_lock more(known);
    const std::scoped_lock most(fresh);  // which no fork() has seen
  });
  while (!held) std::this_thread::yield();
  EXPECT_TRUE(child_succeeds([] {
    for (ForkMutex* mutex : {&known, &outer, &fresh}) const std::scoped_lock lock(*mutex);
    return true;
  }));
  other.join();
}

TEST(MadeOnce, IsWholeInAChild) {
  static constinit MadeOnce<const int> made;
  std::atomic<bool> making = false;
  const auto get = [&] {
    return made.get([&] {
      making = true;
      std::this_thread::sleep_for(milliseconds(50));
      return 7;
    });
  };
  std::thread other(get);
  while (!making) std::this_thread::yield();
  EXPECT_TRUE(child_succeeds([&] { return get() == 7; }));
  other.join();
}

}  // namespace
}  // namespace fulgur
