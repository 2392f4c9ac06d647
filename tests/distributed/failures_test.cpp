// What becomes of the other ranks when one of them dies or hangs.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include "distributed_on_gpus.h"
#include "seed.h"

namespace fulgur::test {
namespace {

/// What ranks compute when one of them gets a signal.
DistributedCase interrupted(int gpus) {
  return {{.dtype = gpus > 0 ? DType::kBF16 : DType::kF32,
           .sq = 512,
           .sk = 512,
           .hq = 4,
           .hk = 4,
           .d = 32,
           .dv = 32,
           .mask = causal()},
          {Sharding::kZigzag}};
}

/// Ranks that compute until an error, which they return with what the group says afterwards; rank 1
/// gets a signal after a while.
std::vector<std::string> after_signal(int signal, int milliseconds, double deadline, int gpus = 0) {
  const DistributedCase problem = interrupted(gpus);
  Workload w(problem.c, 5);
  const DistributedWorkload s{problem, w};
  const int port = free_port();
  constexpr int kRanks = 3;
  Processes processes(kRanks, [&](int rank) {
    const Group group = Group::connect(rank, kRanks, "127.0.0.1", port, deadline);
    std::thread killer;
    if (rank == 1) {
      killer = std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        kill(getpid(), signal);
      });
    }
    const Device device = gpus == 0 ? Device{} : Device{DeviceType::kCuda, rank % gpus};
    const auto error_of_a_call = [&] {
      return message_of([&] { compute_rank(s, group, device); });
    };
    std::string error;
    while (error.empty()) error = error_of_a_call();
    return bytes_of(fmt::format("{}|{}|{}", error, group.dead(), error_of_a_call()));
  });
  return {processes.text(0), processes.text(2)};
}

TEST(DistributedFailures, ARankThatIsKilled) {
  std::mt19937 random(test_seed());
  for (int i = 0; i < 6; ++i) {
    const auto milliseconds = static_cast<int>(i == 0 ? 0 : random() % 100);
    SCOPED_TRACE(testing::Message() << milliseconds << " ms");
    const auto before = std::chrono::steady_clock::now();
    for (const std::string& text : after_signal(SIGKILL, milliseconds, 60)) {
      EXPECT_EQ(text, "rank 1 left|rank 1 left|group: it is dead, as rank 1 left; make a new one");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(20));
  }
}

/// What ranks return where rank 1 hangs.
std::string said_of_hanging(int seconds) {
  const std::string what = fmt::format("rank 1 made no step for {} s", seconds);
  return fmt::format("{}|{}|group: it is dead, as {}; make a new one", what, what, what);
}

TEST(DistributedFailures, ARankThatHangs) {
  for (const std::string& text : after_signal(SIGSTOP, 30, 1)) EXPECT_EQ(text, said_of_hanging(1));
}

TEST_F(DistributedOnGpus, ARankThatIsKilled) {
  for (const int milliseconds : {0, 300, 1500, 3000}) {
    for (const std::string& text : after_signal(SIGKILL, milliseconds, 60, count_)) {
      EXPECT_EQ(text, "rank 1 left|rank 1 left|group: it is dead, as rank 1 left; make a new one");
    }
  }
}

TEST_F(DistributedOnGpus, ARankThatHangs) {
  const DistributedCase problem = interrupted(count_);
  Workload w(problem.c, 5);
  ASSERT_NO_FATAL_FAILURE(compute_by(3, {problem, w}, count_));  // compiles the kernels
  for (const int milliseconds : {1500, 3000}) {
    const auto before = std::chrono::steady_clock::now();
    for (const std::string& text : after_signal(SIGSTOP, milliseconds, 4, count_)) {
      EXPECT_EQ(text, said_of_hanging(4));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(20));
  }
}

// One that never comes ends the call of the other one.
TEST_F(DistributedOnGpus, ARankOfNcclThatHangs) {
  const DistributedCase problem = interrupted(count_);
  Workload w(problem.c, 5);
  const DistributedWorkload s{problem, w};
  Processes processes(1, [&](int) {
    if (dlopen(FAKE_NCCL, RTLD_NOW) == nullptr) return bytes_of("no fake");
    int comm = 0;
    const Group group = Group::from_nccl(&comm, 0.5);
    const auto compute = [&] {
      return message_of([&] { compute_rank(s, group, {DeviceType::kCuda, 0}); });
    };
    const std::string first = compute();
    return bytes_of(fmt::format("{}|{}", first, compute()));
  });
  const std::string said = processes.text(0);
  if (said == "no fake") GTEST_SKIP() << said;
  EXPECT_EQ(said,
            "a rank made no step for 0.5 s|group: it is dead, as a rank made no step for 0.5 s; "
            "make a new one");
}

}  // namespace
}  // namespace fulgur::test
