/// Memory of a GPU. Copy engines fetch rows from other ranks, whose memory is opened here, so that
/// transfers occupy no SM and overlap with attention. The hosts exchange the addresses of rows; the
/// streams signal to each other when rows are ready and when they have been fetched (Signals).
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "cuda/device/gpu.h"
#include "distributed/device/signals.h"
#include "distributed/group/group.h"
#include "distributed/group/memory.h"

namespace fulgur::distributed {

/// Operations on a stream of a GPU.
template <class Interface>
class OnStream : public Interface {
 public:
  using typename Interface::Event;
  OnStream(cuda::Gpu& gpu, cuda::CUstream stream) : gpu_(gpu), stream_(stream) {}
  void copy(const Part& from, const Part& to) override;
  void sum(const Part& from, const Part& with, const Part& to) override;
  void round(const Part& from, const Part& to) override;
  void clear(const Part& part) override;
  void download(void* to, const void* from, int64_t bytes) override;
  void upload(void* to, const void* from, int64_t bytes) override;
  Event record() override;
  void wait(const Event& event) override;
  void synchronize() override;

 protected:
  cuda::Gpu& gpu_;
  cuda::CUstream stream_;
};

class DeviceMemory final : public OnStream<Memory> {
 public:
  /// Collective: all ranks construct it together.
  DeviceMemory(Group::Impl& group, int index);
  ~DeviceMemory() override;
  std::byte* buffer(Use use, int64_t bytes) override;
  std::vector<std::span<std::byte>> exchange(Use from,
                                             std::span<const std::span<const std::byte>> sends,
                                             std::span<const int64_t> receives,
                                             std::span<const std::vector<Place>> places) override;
  bool fetches_in_place() const override { return carrier_ == nullptr; }
  void complete_transfers() override;
  void abandon() override;
  std::unique_ptr<Queue> compute_queue(const Run& run) override;
  std::optional<Run> second_stream(const Run& run) override;

 private:
  struct Buffer {
    cuda::CUdeviceptr data = 0;
    int64_t bytes = 0;
    cuda::CUipcMemHandle handle{};  ///< by which other ranks open it
  };
  /// Memory of another rank, opened here.
  struct Opened {
    cuda::CUipcMemHandle handle{};
    cuda::CUdeviceptr data = 0;
  };
  /// Where a rank finds the bytes that another rank has for it.
  struct Offer {
    cuda::CUipcMemHandle handle{};
    uint64_t process = 0, buffer = 0, offset = 0, bytes = 0, number = 0;
  };
  uint64_t buffer_number(Use use) const { return use == kSends ? kUses + turn_ : uint64_t{use}; }
  Buffer& buffer_of(Use use) { return buffers_.at(buffer_number(use)); }
  cuda::CUdeviceptr open(int rank, const Offer& offer);
  /// Calls visit(rank) for all ranks but this one, starting with the next one.
  template <class Visit>
  void each_other(const Visit& visit) const {
    for (int i = 1; i < group_.ranks; ++i) visit((group_.rank + i) % group_.ranks);
  }
  /// Whether the stream has executed all of its operations.
  bool done() const;
  /// Whether this rank has received all rows of the last exchange.
  bool taken() const;

  Group::Impl& group_;
  GpuTransport* const
      carrier_;  ///< transfers rows; null: they are fetched from other ranks' memory
  /// One for each Use, then two that are used alternately as kSends, so that other ranks fetch from
  /// one while the other one is filled for the next exchange.
  std::array<Buffer, kUses + 2> buffers_;
  uint64_t turn_ = 0;
  std::vector<cuda::CUdeviceptr>
      replaced_;  ///< old buffers that streams, also of other ranks, may still use
  std::vector<std::array<Opened, kUses + 2>> opened_;  ///< of each rank, in the order of buffers_
  bool has_transfers_ = false;
  uint32_t count_ = 0;  ///< number of exchanges
  std::optional<Signals> signals_;
  cuda::CUstream second_ = nullptr;
};

}  // namespace fulgur::distributed
