#include "ranks.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <optional>

#include "fulgur/distributed/plan.h"
#include "fulgur/error.h"

namespace fulgur::app {
namespace {

constexpr int kNext = 0;  // the order for the next case; others are a number of runs

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  ::bind(fd, reinterpret_cast<sockaddr*>(&at), size);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
  ::close(fd);
  return ntohs(at.sin_port);
}

/// A case as a call of all ranks, of which this one has some rows.
class RankWorkload {
 public:
  RankWorkload(const bench::Case& c, const Group& group)
      : distribution_{c.causal ? Sharding::kZigzag : Sharding::kContiguous},
        own_(part_of(c, group)),
        plan_(c.pass == "backward"
                  ? plan(own_.backward(), options_of(c, group), group, distribution_)
                  : plan(own_.forward(), options_of(c, group), group, distribution_)),
        backward_(c.pass == "backward") {}

  void run() const {
    if (backward_) {
      plan_.run(own_.backward());
    } else {
      plan_.run(own_.forward());
    }
    own_.wait();
  }

 private:
  static int threads_of(const bench::Case& c, const Group& group) {
    return std::max(1, c.threads / group.size());
  }
  static Options options_of(const bench::Case& c, const Group& group) {
    return {.mask = c.causal ? causal() : full(), .threads = threads_of(c, group)};
  }
  bench::Case part_of(bench::Case c, const Group& group) const {
    const auto rows = [&](int64_t length) {
      return std::ssize(rows_of(distribution_.sharding, length, group.size(), group.rank()));
    };
    c.threads = threads_of(c, group);
    c.sq = rows(c.sq);
    c.sk = rows(c.sk);
    if (c.device.type == DeviceType::kCuda) c.device.index += group.rank();
    return c;
  }

  Distribution distribution_;
  bench::Workload own_;
  DistributedPlan plan_;
  bool backward_;
};

/// What a rank does as long as there are orders.
void obey(const std::vector<bench::Case>& cases, const Group& group, int orders, int answers) {
  std::optional<RankWorkload> workload;
  auto next = cases.begin();
  for (int order; ::read(orders, &order, sizeof order) == sizeof order;) {
    if (order == kNext) {
      workload.emplace(*next++, group);
      workload->run();
      continue;
    }
    std::vector<double> seconds;
    for (int i = 0; i < order; ++i) {
      const auto start = std::chrono::steady_clock::now();
      workload->run();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      seconds.push_back(time.count());
    }
    std::ranges::nth_element(seconds, seconds.begin() + seconds.size() / 2);
    const double median = seconds[seconds.size() / 2];
    if (group.rank() == 0 && ::write(answers, &median, sizeof median) < 0) return;
  }
}

}  // namespace

RankProcesses::RankProcesses(int ranks, const std::vector<bench::Case>& cases) {
  std::signal(SIGPIPE, SIG_IGN);  // a process that has failed answers nothing
  const int port = free_port();
  int answers[2];
  if (::pipe(answers) != 0) throw Error(Status::kUnavailable, "--ranks: no pipe");
  answers_ = answers[0];
  for (int rank = 0; rank < ranks; ++rank) {
    int orders[2];
    if (::pipe(orders) != 0) throw Error(Status::kUnavailable, "--ranks: no pipe");
    const pid_t pid = ::fork();
    if (pid < 0) throw Error(Status::kUnavailable, "--ranks: no further process");
    if (pid == 0) {
      for (const int fd : orders_) ::close(fd);
      ::close(orders[1]);
      ::close(answers[0]);
      int status = 0;
      try {
        obey(cases, Group::connect(rank, ranks, "127.0.0.1", port), orders[0], answers[1]);
      } catch (const std::exception& error) {
        if (rank == 0) fmt::print(stderr, "error: rank {}: {}\n", rank, error.what());
        status = 1;
      }
      ::_exit(status);
    }
    ::close(orders[0]);
    orders_.push_back(orders[1]);
    pids_.push_back(pid);
  }
  ::close(answers[1]);
}

RankProcesses::~RankProcesses() {
  for (const int fd : orders_) ::close(fd);
  for (const pid_t pid : pids_) ::waitpid(pid, nullptr, 0);
  ::close(answers_);
}

void RankProcesses::send_order(int what) {
  for (const int fd : orders_) {
    if (::write(fd, &what, sizeof what) != sizeof what) break;
  }
}

void RankProcesses::next() { send_order(kNext); }

double RankProcesses::seconds(int runs) {
  send_order(runs);
  double seconds = 0;
  if (::read(answers_, &seconds, sizeof seconds) != sizeof seconds) {
    throw Error(Status::kUnavailable, "--ranks: a process has failed");
  }
  return seconds;
}

}  // namespace fulgur::app
