/// What the processes of a group exchange, over any transport.
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

#include "distributed/group/call_plans.h"
#include "distributed/group/memory.h"
#include "distributed/transport/transport.h"
#include "fulgur/distributed/group.h"
#include "fulgur/error.h"

namespace fulgur::distributed {

/// Names and values that must be the same on all ranks, in a fixed order.
using Fields = std::vector<std::pair<std::string, std::string>>;

/// Throws Error(kInvalidArgument) unless 0 <= rank < ranks.
void check_rank(int rank, int ranks);

}  // namespace fulgur::distributed

namespace fulgur {

struct Group::Impl {
  Impl(int rank, int ranks, std::unique_ptr<distributed::Transport> transport)
      : rank(rank), ranks(ranks), transport_(std::move(transport)) {}

  const int rank, ranks;

  /// A step in which all ranks exchange bytes. Throws Error(kUnavailable); the group is dead then.
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives);
  /// Ends this rank's part in the group, so that the other ranks do not wait for its next step.
  void leave(const std::string& why);
  std::string dead() const;

  /// The transport of GPU memory; null: ranks open each other's memory.
  distributed::GpuTransport* gpu_transport() const { return transport_->gpu_transport(); }

  /// Sends mine[r] to each other rank r. Returns the values of all other ranks for this one.
  template <class T>
  std::vector<T> all_to_all(const std::vector<T>& mine);
  /// Waits until all ranks have called it.
  void barrier() { all_to_all(std::vector<std::byte>(ranks)); }
  /// Throws Error(kUnavailable) unless a rank sends as many bytes as this rank wants.
  void check_bytes(int of_rank, int64_t bytes, int64_t want) const;

  /// Returns the texts of all ranks.
  std::vector<std::string> gather(const std::string& text);
  /// Throws the same error on all ranks if any rank has one, or if fields differ between ranks.
  /// Returns the numbers of all ranks.
  std::vector<std::vector<int64_t>> agree(const std::optional<Error>& error,
                                          const distributed::Fields& fields,
                                          const std::vector<int64_t>& numbers);
  /// The number of calls of agree(), the same on all ranks.
  uint64_t agreements() const { return agreements_; }
  /// Whether all ranks have this plan. A rank that lacks it calls agree() for a new plan instead,
  /// so if the result is false, all ranks have to make a new one.
  bool all_have(uint64_t plan);

  /// The plans of calls that were made without one.
  distributed::CallPlans plans;

  /// The memories of the devices that plans have computed on: memory_of().
  std::map<std::pair<DeviceType, int>, std::unique_ptr<distributed::Memory>> memories;

 private:
  std::unique_ptr<distributed::Transport> transport_;
  uint64_t agreements_ = 0;
  std::mutex steps_;
  mutable std::mutex state_;
  std::string dead_;
};

template <class T>
std::vector<T> Group::Impl::all_to_all(const std::vector<T>& mine) {
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
