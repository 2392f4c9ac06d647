/// Short messages between ranks of one machine, in shared memory. A receiver polls for a while
/// before it sleeps, because a wake-up takes longer than most messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distributed/transport/shared_memory.h"

namespace fulgur::distributed {

class Mailbox {
 public:
  static constexpr size_t kMaxBytes = 4160;  ///< of a message that a slot can hold

  /// `memory`: bytes(ranks) bytes that all ranks share. Those after the first kAnyBytes must be 0.
  Mailbox(SharedMemory memory, int rank, int ranks);
  static int64_t bytes(int ranks);
  static constexpr int64_t kAnyBytes = 64;

  /// Posts the message of a step; only its size if it is longer than kMaxBytes. Steps are numbered
  /// from 1 on, and in each a rank waits for the messages of all others, so that at most two
  /// messages of a rank are in flight.
  void post(int to, uint64_t step, std::span<const std::byte> message);
  /// Waits for the message of a step. Returns its size; none after the timeout.
  std::optional<uint64_t> wait(int from, uint64_t step, std::chrono::milliseconds timeout);
  /// Reads a message that has arrived, of at most kMaxBytes bytes.
  void take(int from, uint64_t step, std::span<std::byte> to);

 private:
  struct Slot;
  Slot& slot(int to, int from, uint64_t step) const;

  SharedMemory memory_;
  int rank_, ranks_;
};

}  // namespace fulgur::distributed
