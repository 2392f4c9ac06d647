/// Host memory, whose operations are complete when they return. Ranks of one machine read each
/// other's memory.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "distributed/group/group.h"
#include "distributed/group/memory.h"
#include "distributed/transport/shared_memory.h"

namespace fulgur::distributed {

/// Operations by the calling thread.
template <class Interface>
class OnHost : public Interface {
 public:
  using typename Interface::Event;
  void copy(const Part& from, const Part& to) override;
  void sum(const Part& from, const Part& with, const Part& to) override;
  void round(const Part& from, const Part& to) override;
  void clear(const Part& part) override;
  void download(void* to, const void* from, int64_t bytes) override;
  void upload(void* to, const void* from, int64_t bytes) override;
  Event record() override { return nullptr; }
  void wait(const Event&) override {}
  void synchronize() override {}
};

class HostMemory final : public OnHost<Memory> {
 public:
  /// Collective: all ranks construct it together.
  explicit HostMemory(Group::Impl& group);
  std::byte* buffer(Use use, int64_t bytes) override;
  std::vector<std::span<std::byte>> exchange(Use from,
                                             std::span<const std::span<const std::byte>> sends,
                                             std::span<const int64_t> receives,
                                             std::span<const std::vector<Place>> places) override;
  void complete_transfers() override {}
  std::unique_ptr<Queue> compute_queue(const Run& run) override;
  bool has_shared_buffers() const override { return one_machine_; }
  void reserve(int64_t bytes, int64_t of_work) override;
  std::byte* shared_buffer() override;
  std::byte* work_buffer() override { return work_[0].data(); }
  void barrier() override;

 private:
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    int64_t bytes = 0;
  };
  /// Where a rank finds the bytes that another rank has for it.
  struct Offer {
    SharedMemory::Name buffer;
    int64_t size = 0, offset = 0, bytes = 0;
    bool fresh = false;  ///< other ranks have not opened the buffer yet
  };

  void reserve(std::span<SharedMemory> buffers, int64_t bytes);
  /// A barrier after each rank has opened new buffers of the others, so that none of them ends
  /// before. Throws `error`, that of this rank, or the error that another rank has left, whose
  /// buffers are gone.
  void wait_until_opened(const std::optional<Error>& error);

  Group::Impl& group_;
  bool one_machine_ = false;  ///< all ranks can open each other's memory
  std::array<Buffer, kUses> buffers_;
  /// Used alternately as kSends: a rank that begins the next exchange has read the data of this
  /// one.
  std::array<SharedMemory, 2> sends_;
  int turn_ = 0;
  bool fresh_ = false;                               ///< sends_[turn_] is newly allocated
  std::vector<std::array<SharedMemory, 2>> others_;  ///< kSends of the other ranks
  std::array<SharedMemory, kSharedBuffers> shared_;
  int next_shared_ = 0;
  std::array<SharedMemory, 1> work_;
};

}  // namespace fulgur::distributed
