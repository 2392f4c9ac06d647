/// What the processes of a group say to each other, whatever carries it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distributed/call_plans.h"
#include "distributed/memory.h"
#include "distributed/transport/transport.h"
#include "fulgur/distributed/group.h"
#include "fulgur/error.h"

namespace fulgur::distributed {

/// Names and values that must be the same on all ranks, in a fixed order.
using Fields = std::vector<std::pair<std::string, std::string>>;

/// Throws Error(kInvalidArgument) where there is no such rank.
void check_rank(int rank, int ranks);

}  // namespace fulgur::distributed

namespace fulgur {

struct Group::Impl {
  Impl(int rank, int ranks, std::unique_ptr<distributed::Transport> transport)
      : rank(rank), ranks(ranks), transport_(std::move(transport)) {}

  const int rank, ranks;

  /// A step of all ranks. Throws Error(kUnavailable), by which the group is dead.
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives);
  /// This rank makes no further step: the others need not wait for one.
  void leave(const std::string& why);
  std::string dead() const;

  /// What carries memory of GPUs; null: ranks open each other's.
  distributed::GpuTransport* of_gpus() const { return transport_->of_gpus(); }

  /// A value of every other rank: to rank r goes mine[r].
  template <class T>
  std::vector<T> tell(const std::vector<T>& mine);
  /// Waits until all ranks have come here.
  void meet() { tell(std::vector<std::byte>(ranks)); }
  /// Throws Error(kUnavailable) where a rank has other bytes for this one than it wants.
  void check_bytes(int of_rank, int64_t bytes, int64_t want) const;

  /// The texts of all ranks.
  std::vector<std::string> gather(const std::string& text);
  /// Throws, on all ranks alike, where any of them has an error, or where fields are not the same
  /// on all. Returns the numbers of all ranks.
  std::vector<std::vector<int64_t>> agree(const std::optional<Error>& error,
                                          const distributed::Fields& fields,
                                          const std::vector<int64_t>& numbers);
  /// How often ranks have been asked to agree: the same on all.
  uint64_t agreements() const { return agreements_; }
  /// Whether all ranks ask for this plan. A rank that has none agrees about a new one meanwhile, so
  /// that all have to where they do not.
  bool all_have(uint64_t plan);

  /// Of calls that were made without a plan.
  distributed::CallPlans plans;

  /// Of the devices that plans have computed on: memory_of().
  std::map<std::pair<DeviceType, int>, std::unique_ptr<distributed::Memory>> memories;

 private:
  std::unique_ptr<distributed::Transport> transport_;
  uint64_t agreements_ = 0;
  std::mutex steps_;
  mutable std::mutex state_;
  std::string dead_;
};

template <class T>
std::vector<T> Group::Impl::tell(const std::vector<T>& mine) {
  std::vector<T> theirs(ranks);
  std::vector<std::span<const std::byte>> sends(ranks);
  std::vector<std::span<std::byte>> receives(ranks);
  for (int r = 0; r < ranks; ++r) {
    if (r == rank) continue;
    sends[r] = std::as_bytes(std::span(&mine[r], 1));
    receives[r] = std::as_writable_bytes(std::span(&theirs[r], 1));
  }
  exchange(sends, receives);
  return theirs;
}

}  // namespace fulgur
