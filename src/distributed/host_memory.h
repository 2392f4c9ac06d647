/// Memory of the host: all is done at once. Ranks of one machine read each other's.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "distributed/group.h"
#include "distributed/memory.h"
#include "distributed/transport/shared_room.h"

namespace fulgur::distributed {

/// Operations of the thread that calls.
template <class Interface>
class OnHost : public Interface {
 public:
  using typename Interface::Mark;
  void copy(const Part& from, const Part& to) override;
  void sum(const Part& from, const Part& with, const Part& to) override;
  void round(const Part& from, const Part& to) override;
  void clear(const Part& part) override;
  void download(void* to, const void* from, int64_t bytes) override;
  void upload(void* to, const void* from, int64_t bytes) override;
  Mark mark() override { return nullptr; }
  void after(const Mark&) override {}
  void finish() override {}
};

class HostMemory final : public OnHost<Memory> {
 public:
  /// Collective.
  explicit HostMemory(Group::Impl& group);
  std::byte* room(Use use, int64_t bytes) override;
  std::vector<std::span<std::byte>> exchange(Use from,
                                             std::span<const std::span<const std::byte>> sends,
                                             std::span<const int64_t> receives,
                                             std::span<const std::vector<Place>> places) override;
  void settle() override {}
  std::unique_ptr<Order> computing(const Run& run) override;
  bool has_common() const override { return one_machine_; }
  void reserve(int64_t bytes, int64_t of_work) override;
  std::byte* common() override;
  std::byte* work() override { return work_[0].data(); }
  void meet() override;

 private:
  struct Room {
    std::unique_ptr<std::byte[]> data;
    int64_t bytes = 0;
  };
  /// What a rank says of the bytes that it has for another one.
  struct Offer {
    SharedRoom::Name room;
    int64_t size = 0, offset = 0, bytes = 0;
    bool fresh = false;  ///< others have not opened the room yet
  };

  void reserve(std::span<SharedRoom> rooms, int64_t bytes);

  Group::Impl& group_;
  bool one_machine_ = false;  ///< all ranks open each other's memory
  std::array<Room, kUses> rooms_;
  /// kSends in turn: a rank that comes to the next exchange has read what there was in this one.
  std::array<SharedRoom, 2> sends_;
  int turn_ = 0;
  bool fresh_ = false;                             ///< the room of this turn
  std::vector<std::array<SharedRoom, 2>> others_;  ///< kSends of other ranks
  std::array<SharedRoom, kInCommon> common_;
  int next_common_ = 0;
  std::array<SharedRoom, 1> work_;
};

}  // namespace fulgur::distributed
