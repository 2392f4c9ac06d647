/// Short messages between ranks of one machine, by memory that they have in common. Who waits for
/// one looks for it for a while before it sleeps: waking up takes longer than most messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "distributed/transport/shared_room.h"

namespace fulgur::distributed {

class Mailbox {
 public:
  static constexpr size_t kMost = 4160;  ///< bytes of a message that it carries

  /// In a room of so many bytes, the same of all ranks, of which the first ones may be any and the
  /// others are 0.
  Mailbox(SharedRoom room, int rank, int ranks);
  static int64_t bytes(int ranks);
  static constexpr int64_t kAnyBytes = 64;

  /// The message of a step; of a longer one its size. Steps are numbered from 1 on, and every rank
  /// waits for the messages of all others in each, so that there are two of a rank at most.
  void post(int to, uint64_t step, std::span<const std::byte> message);
  /// Waits for the message of a step for so long at most: its size.
  std::optional<uint64_t> wait(int from, uint64_t step, std::chrono::milliseconds most);
  /// One that has come, of kMost bytes at most.
  void take(int from, uint64_t step, std::span<std::byte> to);

 private:
  struct Slot;
  Slot& slot(int to, int from, uint64_t step) const;

  SharedRoom room_;
  int rank_, ranks_;
};

}  // namespace fulgur::distributed
