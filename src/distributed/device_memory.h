/// Memory of a GPU. Copy engines bring rows from other ranks, whose memory is opened here, so that
/// transfers take no SM and hide behind attention.
#pragma once

#include <array>
#include <vector>

#include "cuda/device/gpu.h"
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
  void add(const Part& from, const Part& to) override;
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
  void exchange(std::span<const std::span<const std::byte>> sends,
                std::span<const std::span<std::byte>> receives) override;
  void settle() override;
  std::unique_ptr<Order> computing(const Run& run) override;

 private:
  struct Room {
    cuda::CUdeviceptr data = 0;
    int64_t bytes = 0;
  };
  /// Memory of another rank, opened here.
  struct Opened {
    cuda::CUipcMemHandle handle{};
    cuda::CUdeviceptr data = 0;
  };
  /// What a rank says of the bytes that it has for another one.
  struct Offer {
    cuda::CUipcMemHandle handle{};
    uint64_t process = 0, room = 0, offset = 0, bytes = 0;
  };
  cuda::CUdeviceptr open(int rank, const Offer& offer);
  /// An offer of each rank, or the first byte of it.
  std::vector<Offer> tell(const std::vector<Offer>& mine, size_t bytes);

  Group::Impl& group_;
  std::array<Room, kUses> rooms_;
  cuda::CUipcMemHandle sends_handle_{};
  std::vector<cuda::CUdeviceptr> replaced_;  ///< that others may have opened
  std::vector<Opened> opened_;
  bool unsettled_ = false;
};

}  // namespace fulgur::distributed
