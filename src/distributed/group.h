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

#include "distributed/memory.h"
#include "distributed/transport.h"
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

  /// The texts of all ranks.
  std::vector<std::string> gather(const std::string& text);
  /// Throws, on all ranks alike, where any of them has an error, or where fields are not the same
  /// on all. Returns the numbers of all ranks.
  std::vector<std::vector<int64_t>> agree(const std::optional<Error>& error,
                                          const distributed::Fields& fields,
                                          const std::vector<int64_t>& numbers);

  /// Of the GPUs that plans have computed on.
  std::map<int, std::shared_ptr<distributed::Memory>> on_devices;

 private:
  std::unique_ptr<distributed::Transport> transport_;
  std::mutex steps_;
  mutable std::mutex state_;
  std::string dead_;
};

}  // namespace fulgur
