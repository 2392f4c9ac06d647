// How a group is made: by the environment, a function that exchanges bytes, a communicator of NCCL.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <thread>

#include "distributed_on_gpus.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

TEST(DistributedErrors, Groups) {
  EXPECT_EQ(message_of([] { Group::connect(2, 2, "127.0.0.1", 1); }), "rank: got 2, want 0 to 1");
  EXPECT_EQ(message_of([] { Group::connect(0, 0, "127.0.0.1", 1); }),
            "ranks: got 0, want at least 1");
  EXPECT_EQ(message_of([] { Group::connect(0, 2, "127.0.0.1", 1, 0); }),
            "deadline: got 0, want a number of seconds > 0");
  EXPECT_EQ(message_of([] { Group::from_exchange(0, 1, {}); }),
            "exchange: not given, want a function");
  EXPECT_EQ(message_of([] { Group::from_nccl(nullptr); }),
            "comm: got null, want a communicator of NCCL");
  int other = 0;
  EXPECT_EQ(message_of([&] { Group::from_nccl(&other); }),
            "comm: this process has not loaded libnccl.so.2, want a communicator of it");
  EXPECT_EQ(message_of([&] { Group::from_nccl(&other, 0); }),
            "deadline: got 0, want a number of seconds > 0");
  const int port = free_port();
  EXPECT_EQ(message_of([&] { Group::connect(0, 2, "127.0.0.1", port, 0.1); }),
            "rank 1 did not come within the deadline");
  EXPECT_EQ(message_of([&] { Group::connect(1, 2, "127.0.0.1", port, 0.1); }),
            fmt::format("rank 0 at 127.0.0.1:{} cannot be reached: Connection refused", port));
}

TEST(Distributed, GroupOfTheEnvironment) {
  const int port = free_port();
  const std::pair<const char*, const char*> names[] = {
      {"RANK", "WORLD_SIZE"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
      {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const auto& [rank_name, size_name] : names) {
    Processes processes(2, [&, rank_name = rank_name, size_name = size_name](int rank) {
      setenv(rank_name, std::to_string(rank).c_str(), 1);
      setenv(size_name, "2", 1);
      setenv("FULGUR_PORT", std::to_string(port).c_str(), 1);
      const Group group = Group::from_env(60);
      return bytes_of(fmt::format("{} of {}", group.rank(), group.size()));
    });
    EXPECT_EQ(processes.text(0), "0 of 2");
    EXPECT_EQ(processes.text(1), "1 of 2");
  }
  EXPECT_EQ(Group::from_env().size(), 1);
}

// A function that exchanges bytes is enough to make a group.
TEST(Distributed, ExchangeByTheCaller) {
  const DistributedCase problem{{.dtype = DType::kF32,
                                 .sq = 200,
                                 .sk = 200,
                                 .hq = 2,
                                 .hk = 2,
                                 .d = 16,
                                 .dv = 16,
                                 .mask = causal()},
                                {Sharding::kZigzag}};
  constexpr int kRanks = 3;
  Workload w(problem.c, 4);
  w.options.threads = 1;
  w.options.invariant = true;
  w.run();
  const auto want = all_bits(w);
  w.seal();
  const DistributedWorkload s{problem, w};
  std::barrier<> meeting(kRanks);
  std::span<const std::span<const std::byte>> said[kRanks];
  std::vector<Bytes> results(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const Group group = Group::from_exchange(rank, kRanks, [&, rank](auto sends, auto receives) {
        said[rank] = sends;
        meeting.arrive_and_wait();
        for (int r = 0; r < kRanks; ++r) {
          if (r == rank) continue;
          std::memcpy(receives[r].data(), said[r][rank].data(), receives[r].size());
        }
        meeting.arrive_and_wait();
      });
      results[rank] = compute_rank(s, group);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(put(s, kRanks, rank, results[rank]));
  EXPECT_EQ(all_bits(w) == want, true);
}

/// A communicator of processes that each see one GPU; the first one sends its id to the others.
class NcclComms {
 public:
  explicit NcclComms(int ranks) : ranks_(ranks) { EXPECT_EQ(pipe(ids_), 0); }
  static bool loads() { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL) != nullptr; }
  void* connect(int rank) const {
    struct Id {
      char bytes[128];
    } id{};
    setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    const auto get_id = reinterpret_cast<int (*)(Id*)>(dlsym(library, "ncclGetUniqueId"));
    const auto init =
        reinterpret_cast<int (*)(void**, int, Id, int)>(dlsym(library, "ncclCommInitRank"));
    if (rank == 0) {
      get_id(&id);
      for (int r = 1; r < ranks_; ++r) EXPECT_EQ(::write(ids_[1], &id, sizeof id), sizeof id);
    } else {
      EXPECT_EQ(::read(ids_[0], &id, sizeof id), sizeof id);
    }
    void* comm = nullptr;
    if (init(&comm, ranks_, id, rank) != 0) throw std::runtime_error("no communicator");
    return comm;
  }

 private:
  int ranks_, ids_[2] = {};
};

// Rows and what ranks say by NCCL, which takes a GPU for each of them.
TEST_F(DistributedOnGpus, RowsByNccl) {
  if (Processes(1, [](int) { return bytes_of(NcclComms::loads() ? "yes" : "no"); }).text(0) ==
      "no") {
    GTEST_SKIP() << "no NCCL";
  }
  const int ranks = std::min(count_, 2);
  for (const int head_ranks : {1, ranks}) {
    SCOPED_TRACE(testing::Message() << head_ranks << " share out heads");
    const DistributedCase problem{{.dtype = DType::kBF16,
                                   .batch = 2,
                                   .sq = 300,
                                   .sk = 300,
                                   .hq = 8,
                                   .hk = 4,
                                   .d = 64,
                                   .dv = 64,
                                   .mask = causal(),
                                   .sinks = true},
                                  {Sharding::kZigzag, head_ranks}};
    Workload w(problem.c, 12);
    w.options.deterministic = true;
    const Expected e = expect(w);
    const DistributedWorkload s{problem, w};
    ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s, count_));
    const auto want = all_bits(w);
    w.seal();
    const NcclComms comms(ranks);
    Processes processes(ranks, [&](int rank) {
      const Group group = Group::from_nccl(comms.connect(rank), 60);
      return compute_rank(s, group, {DeviceType::kCuda, 0});
    });
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_TRUE(put(s, ranks, rank, processes.result(rank)));
    }
    EXPECT_EQ(all_bits(w) == want, true);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

}  // namespace
}  // namespace fulgur::test
