// Which numbers the threads of parallel_for have, and what it does with exceptions.
#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

namespace fulgur::test {
namespace {

// Scratch memory is divided by these numbers of threads, for the requested number of threads.
TEST(ParallelFor, NumbersOfThreadsAreItsOwnInACallersTeam) {
  std::atomic<int> calls = 0, wrong = 0, in_team = 0;
#pragma omp parallel num_threads(4)
  {
    in_team += omp_in_parallel();
    parallel_for(8, 1, [&](int64_t) {
      ++calls;
      if (thread_index() != 0) ++wrong;
    });
  }
  EXPECT_EQ(in_team, 4);
  EXPECT_EQ(calls, 4 * 8);
  EXPECT_EQ(wrong, 0);
}

TEST(ParallelFor, OneThreadGoesInOrder) {
  int64_t next = 0;
  parallel_for(100, 1, [&](int64_t i) {
    EXPECT_EQ(i, next++);
    EXPECT_EQ(thread_index(), 0);
  });
  EXPECT_EQ(next, 100);
}

TEST(ParallelFor, RethrowsWhatABodyThrows) {
  for (const int threads : {1, 4}) {
    const auto body = [](int64_t i) {
      if (i == 5) throw std::runtime_error("at 5");
    };
    EXPECT_THROW(parallel_for(8, threads, body), std::runtime_error) << threads << " threads";
  }
}

}  // namespace
}  // namespace fulgur::test
