#include "distributed/group/group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/check.h"
#include "distributed/transport/nccl.h"
#include "distributed/transport/simulated.h"
#include "distributed/transport/sockets.h"

namespace fulgur {

void distributed::check_rank(int rank, int ranks) {
  if (ranks < 1) fail("ranks", "got {}, want at least 1", ranks);
  if (rank < 0 || rank >= ranks) fail("rank", "got {}, want 0 to {}", rank, ranks - 1);
}

namespace {

using distributed::Fields;
using distributed::Transport;

/// A transport that calls the caller's function.
class Callback final : public Transport {
 public:
  explicit Callback(Exchange exchange) : exchange_(std::move(exchange)) {}
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives) override {
    exchange_(sends, receives);
  }
  void abort(const std::string&) override {}

 private:
  Exchange exchange_;
};

/// The transport of a group of one rank, which exchanges nothing.
class SingleRank final : public Transport {
 public:
  void exchange(std::span<const std::span<const std::byte>>,
                std::span<const std::span<std::byte>>) override {}
  void abort(const std::string&) override {}
};

/// The beginning of the text of a rank that has the plan of its call.
constexpr char kPlan[] = "plan ";

/// The number in an environment variable.
std::optional<int> number(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*text == 0 || *end != 0 || value < 0 || value > 1 << 30) {
    fail(name, "got \"{}\" in the environment, want a number", text);
  }
  return static_cast<int>(value);
}

}  // namespace

Group Group::from_env(double deadline) {
  // torchrun; Open MPI; MPICH and its relatives; srun.
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"RANK", "WORLD_SIZE"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
      {"PMI_RANK", "PMI_SIZE"},
      {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const auto& names : kNames) {
    const std::optional<int> rank = number(names.first), ranks = number(names.second);
    if (!rank && !ranks) continue;
    if (!rank || !ranks) {
      fail(rank ? names.second : names.first, "not in the environment, want it with {}",
           rank ? names.first : names.second);
    }
    const char* const host = std::getenv("MASTER_ADDR");
    const std::optional<int> own = number("FULGUR_PORT"), other = number("MASTER_PORT");
    const int port = own ? *own : other.value_or(29510) + 1;
    return connect(*rank, *ranks, host != nullptr ? host : "127.0.0.1", port, deadline);
  }
  return connect(0, 1, "", 0, deadline);
}

Group Group::connect(int rank, int ranks, const std::string& host, int port, double deadline) {
  distributed::check_rank(rank, ranks);
  if (!(deadline > 0)) fail("deadline", "got {}, want a number of seconds > 0", deadline);
  if (ranks == 1) return Group(std::make_shared<Impl>(0, 1, std::make_unique<SingleRank>()));
  return Group(std::make_shared<Impl>(
      rank, ranks, distributed::connect_sockets(rank, ranks, host, port, deadline)));
}

Group Group::from_nccl(void* comm, double deadline) {
  if (!(deadline > 0)) fail("deadline", "got {}, want a number of seconds > 0", deadline);
  const distributed::NcclPlace place = distributed::place_of_nccl(comm);
  return Group(
      std::make_shared<Impl>(place.rank, place.ranks, distributed::connect_nccl(comm, deadline)));
}

Group Group::from_exchange(int rank, int ranks, Exchange exchange) {
  distributed::check_rank(rank, ranks);
  if (!exchange) fail("exchange", "not given, want a function");
  return Group(
      std::make_shared<Impl>(rank, ranks, std::make_unique<Callback>(std::move(exchange))));
}

Group Group::simulated(int rank, int ranks) {
  distributed::check_rank(rank, ranks);
  return Group(std::make_shared<Impl>(rank, ranks, distributed::simulated_ranks()));
}

int Group::rank() const { return impl_->rank; }
int Group::size() const { return impl_->ranks; }
std::string Group::dead() const { return impl_->dead(); }

std::string Group::Impl::dead() const {
  const std::lock_guard lock(state_);
  return dead_;
}

void Group::Impl::exchange(std::span<const std::span<const std::byte>> sends,
                           std::span<const std::span<std::byte>> receives) {
  const std::lock_guard step(steps_);
  if (const std::string why = dead(); !why.empty()) {
    throw Error(Status::kUnavailable, fmt::format("group: it is dead, as {}; make a new one", why));
  }
  try {
    transport_->exchange(sends, receives);
  } catch (const std::exception& error) {
    leave(error.what());
    if (dynamic_cast<const Error*>(&error) != nullptr) throw;
    throw Error(Status::kUnavailable, fmt::format("exchange: {}", error.what()));
  }
}

void Group::Impl::leave(const std::string& why) {
  const std::lock_guard lock(state_);
  if (!dead_.empty()) return;
  dead_ = why;
  transport_->abort(why);
  for (const auto& [device, memory] : memories) {
    if (memory != nullptr) memory->abandon();
  }
}

void Group::Impl::check_bytes(int of_rank, int64_t bytes, int64_t want) const {
  if (bytes == want) return;
  throw Error(Status::kUnavailable,
              fmt::format("rank {} has {} bytes, want {}: all ranks make the same calls of a group "
                          "in one order",
                          of_rank, bytes, want));
}

std::vector<std::string> Group::Impl::gather(const std::string& text) {
  // The first step exchanges the sizes and the first bytes; most texts have no more.
  constexpr size_t kFirst = 4096;
  struct First {
    uint64_t size;
    char text[kFirst];
  };
  std::vector<std::string> all(ranks);
  all[rank] = text;
  std::vector<std::span<const std::byte>> sends(ranks);
  std::vector<std::span<std::byte>> receives(ranks);
  First own{text.size(), {}};
  text.copy(own.text, kFirst);
  std::vector<First> firsts(ranks);
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    sends[r] = std::as_bytes(std::span(&own, 1));
    receives[r] = std::as_writable_bytes(std::span(&firsts[r], 1));
  }
  exchange(sends, receives);
  bool more = text.size() > kFirst;
  const auto rest = [kFirst](auto whole) { return whole.subspan(std::min(kFirst, whole.size())); };
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    all[r].resize(firsts[r].size);
    std::copy_n(firsts[r].text, std::min<size_t>(kFirst, firsts[r].size), all[r].data());
    sends[r] = rest(std::as_bytes(std::span(text)));
    receives[r] = rest(std::as_writable_bytes(std::span(all[r])));
    more |= firsts[r].size > kFirst;
  }
  if (more) exchange(sends, receives);
  return all;
}

bool Group::Impl::all_have(uint64_t plan) {
  const std::string mine = kPlan + std::to_string(plan);
  const std::vector<std::string> all = gather(mine);
  return std::ranges::count(all, mine) == ranks;
}

std::vector<std::vector<int64_t>> Group::Impl::agree(const std::optional<Error>& error,
                                                     const Fields& fields,
                                                     const std::vector<int64_t>& numbers) {
  // One line for each of: the status, the message, the numbers, then names and values.
  std::string text = fmt::format(
      "{}\n{}\n{}\n", error ? static_cast<int>(error->status()) : static_cast<int>(Status::kOk),
      error ? error->what() : "", fmt::join(numbers, " "));
  for (const auto& [name, value] : fields) text += fmt::format("{}\n{}\n", name, value);
  ++agreements_;
  std::vector<std::vector<std::string>> lines(ranks);
  std::vector<std::string> texts = gather(text);
  const auto has_plan = [](const std::string& of) { return of.starts_with(kPlan); };
  if (std::ranges::any_of(texts, has_plan))
    texts = gather(text);  // other ranks know now that one lacks the plan
  for (int r = 0; r < ranks; ++r) {
    std::istringstream all(texts[r]);
    for (std::string line; std::getline(all, line);) lines[r].push_back(line);
    if (lines[r].size() < 3) {
      fail("group", "rank {} runs another version of fulgur than rank {}", r, rank);
    }
    const auto status = static_cast<Status>(std::atoi(lines[r][0].c_str()));
    if (status != Status::kOk) throw Error(status, fmt::format("rank {}: {}", r, lines[r][1]));
  }
  for (int r = 1; r < ranks; ++r) {
    for (size_t i = 3; i + 1 < lines[0].size(); i += 2) {
      const std::string& name = lines[0][i];
      if (i + 1 >= lines[r].size() || lines[r][i] != name) {
        fail("group", "rank {} runs another version of fulgur than rank 0", r);
      }
      if (lines[r][i + 1] == lines[0][i + 1]) continue;
      fail(name.c_str(), "rank {} has {}, rank 0 has {}", r, lines[r][i + 1], lines[0][i + 1]);
    }
  }
  std::vector<std::vector<int64_t>> all(ranks);
  for (int r = 0; r < ranks; ++r) {
    std::istringstream line(lines[r][2]);
    for (int64_t n; line >> n;) all[r].push_back(n);
  }
  return all;
}

}  // namespace fulgur
