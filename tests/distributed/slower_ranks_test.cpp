// Ranks of one machine that compute rows of slower ones.
#include <gtest/gtest.h>
#include <sys/time.h>

#include <csignal>
#include <cstring>
#include <ctime>
#include <deque>

#include "ranks.h"

namespace fulgur::test {
namespace {

/// Has a thread of this process sleep whenever that has computed for some milliseconds, a few
/// times.
void slow_down() {
  static volatile std::sig_atomic_t times;
  times = 8;
  struct sigaction action {};
  action.sa_handler = [](int) {
    if (times == 0) return;
    times = times - 1;
    const timespec time{0, 300'000'000};
    nanosleep(&time, nullptr);
  };
  action.sa_flags = SA_RESTART;
  sigaction(SIGPROF, &action, nullptr);
  const itimerval timer{{0, 2000}, {0, 2000}};
  setitimer(ITIMER_PROF, &timer, nullptr);
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A rank of this machine that is done computes rows of slower ones, with the same bits. The work
// takes a multiple of the 4 ms or so by which a kernel may count what a process has computed.
TEST(Distributed, RanksComputeRowsOfSlowerOnes) {
  std::vector<DistributedCase> problems = {{{.dtype = DType::kF32,
                                             .batch = 2,
                                             .sq = 4500,
                                             .sk = 4500,
                                             .hq = 4,
                                             .hk = 2,
                                             .mask = causal(),
                                             .dropout = 0.1,
                                             .seqused_q = true,
                                             .seqused = true,
                                             .sinks = true,
                                             .bias = Bias::kShared},
                                            {Sharding::kZigzag}},
                                           {{.dtype = DType::kBF16,
                                             .batch = 2,
                                             .sq = 6000,
                                             .sk = 6000,
                                             .hq = 4,
                                             .hk = 4,
                                             .mask = causal(),
                                             .alibi = Alibi::kHeads},
                                            {Sharding::kByArea}}};
  problems.back().c.layout = Layout::kPacked;
  problems.back().lengths = {{0, 0, 6000, 6000}, {6000, 6000, 2600, 2600}};
  for (const DistributedCase& problem : problems) {
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 14, problem.lengths);
    w.options.threads = 1;
    w.options.invariant = true;
    w.run_forward();
    const double before_all = cpu_seconds();
    w.run_forward();
    const double all = cpu_seconds() - before_all;
    const DistributedWorkload s{problem, w};
    for (const int threads : {1, 2}) {
      const int port = free_port();
      Processes processes(2, [&](int rank) {
        const Group group = Group::connect(rank, 2, "127.0.0.1", port, 60);
        ForwardTensors f = w.forward;
        std::deque<Taken> memory;
        const auto own = [&](Tensor& t, int dim, bool of_q) {
          memory.push_back(take(t, dim, s.rows(of_q, 2, rank)));
          t = memory.back().tensor;
        };
        own(f.q, s.row_dim(), true);
        own(f.out, s.row_dim(), true);
        own(f.k, s.row_dim(), false);
        own(f.v, s.row_dim(), false);
        own(f.lse, s.lse_dim(), true);
        Options options = w.options;
        options.threads = threads;
        options.max_seqlen_q = options.max_seqlen_k = 0;
        const DistributedPlan made = plan(f, options, group, problem.distribution);
        if (rank == 1) slow_down();
        const double before = cpu_seconds();
        made.run(f, w.run_options);
        const double seconds = cpu_seconds() - before;
        Bytes all = bits(f.out);
        const Bytes lse = bits(f.lse);
        all.insert(all.end(), lse.begin(), lse.end());
        all.resize(all.size() + sizeof(double));
        std::memcpy(&*all.end() - sizeof(double), &seconds, sizeof(double));
        return all;
      });
      double seconds = 0;  // of the slow rank, which waits for no other
      for (int rank = 0; rank < 2; ++rank) {
        const std::vector<int64_t> rows = s.rows(true, 2, rank);
        Bytes want = bits(take(w.forward.out, s.row_dim(), rows).tensor);
        const Bytes lse = bits(take(w.forward.lse, s.lse_dim(), rows).tensor);
        want.insert(want.end(), lse.begin(), lse.end());
        Bytes got = processes.result(rank);
        ASSERT_EQ(got.size(), want.size() + sizeof(double))
            << std::string(reinterpret_cast<const char*>(got.data()), got.size());
        std::memcpy(&seconds, got.data() + want.size(), sizeof(double));
        got.resize(want.size());
        EXPECT_EQ(got == want, true) << "rank " << rank;
      }
      // Half of the rows are its own; it offers three quarters of these. With two threads one goes
      // on while the other sleeps.
      if (threads == 1) {
        EXPECT_LT(seconds, 0.4 * all);
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::test
