/// Memory of a GPU. Copy engines bring rows from other ranks, whose memory is opened here, so that
/// transfers take no SM and overlap attention. The host says where rows lie; that they are there,
/// and that they have been taken, streams tell each other.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "cuda/device/gpu.h"
#include "distributed/device/signals.h"
#include "distributed/group.h"
#include "distributed/memory.h"

namespace fulgur::distributed {

/// Operations on a stream of a GPU.
template <class Interface>
class OnStream : public Interface {
 public:
  using typename Interface::Mark;
  OnStream(cuda::Gpu& gpu, cuda::CUstream stream) : gpu_(gpu), stream_(stream) {}
  void copy(const Part& from, const Part& to) override;
  void sum(const Part& from, const Part& with, const Part& to) override;
  void round(const Part& from, const Part& to) override;
  void clear(const Part& part) override;
  void download(void* to, const void* from, int64_t bytes) override;
  void upload(void* to, const void* from, int64_t bytes) override;
  Mark mark() override;
  void after(const Mark& mark) override;
  void finish() override;

 protected:
  cuda::Gpu& gpu_;
  cuda::CUstream stream_;
};

class DeviceMemory final : public OnStream<Memory> {
 public:
  /// Collective.
  DeviceMemory(Group::Impl& group, int index);
  ~DeviceMemory() override;
  std::byte* room(Use use, int64_t bytes) override;
  std::vector<std::span<std::byte>> exchange(Use from,
                                             std::span<const std::span<const std::byte>> sends,
                                             std::span<const int64_t> receives,
                                             std::span<const std::vector<Place>> places) override;
  bool offers_steps() const override { return carrier_ == nullptr; }
  void settle() override;
  void abandon() override;
  std::unique_ptr<Order> computing(const Run& run) override;
  std::optional<Run> second(const Run& run) override;

 private:
  struct Room {
    cuda::CUdeviceptr data = 0;
    int64_t bytes = 0;
    cuda::CUipcMemHandle handle{};  ///< of what others open
  };
  /// Memory of another rank, opened here.
  struct Opened {
    cuda::CUipcMemHandle handle{};
    cuda::CUdeviceptr data = 0;
  };
  /// What a rank says of the bytes that it has for another one.
  struct Offer {
    cuda::CUipcMemHandle handle{};
    uint64_t process = 0, room = 0, offset = 0, bytes = 0, number = 0;
  };
  uint64_t room_number(Use use) const { return use == kSends ? kUses + turn_ : uint64_t{use}; }
  Room& room_of(Use use) { return rooms_.at(room_number(use)); }
  cuda::CUdeviceptr open(int rank, const Offer& offer);
  /// Visits all ranks but this one, the next one first.
  template <class Visit>
  void each_other(const Visit& visit) const {
    for (int i = 1; i < group_.ranks; ++i) visit((group_.rank + i) % group_.ranks);
  }
  /// Whether all that is in the stream has been done.
  bool done() const;
  /// Whether what comes from all ranks has come, by the last exchange.
  bool taken() const;

  Group::Impl& group_;
  GpuTransport* const carrier_;  ///< of rows; null: they are fetched from other ranks' memory
  /// The last two are kSends in turn, so that others take what lies there while the next exchange
  /// is prepared.
  std::array<Room, kUses + 2> rooms_;
  uint64_t turn_ = 0;
  std::vector<cuda::CUdeviceptr> replaced_;            ///< that streams may use, of others, too
  std::vector<std::array<Opened, kUses + 2>> opened_;  ///< as rooms_, of each rank
  bool unsettled_ = false;
  uint32_t count_ = 0;  ///< of exchanges
  std::optional<Signals> signals_;
  cuda::CUstream second_ = nullptr;
};

}  // namespace fulgur::distributed
