/// The interface of what transfers the bytes of a group.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace fulgur::distributed {

/// Transfers memory of a GPU in stream order.
class GpuTransport {
 public:
  static constexpr int kAnyDevice = -1;
  virtual ~GpuTransport() = default;
  virtual int device() const = 0;
  /// An Exchange of GPU memory; waits until it is done. Throws Error(kUnavailable).
  virtual void exchange(std::span<const std::span<const std::byte>> sends,
                        std::span<const std::span<std::byte>> receives, void* stream) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// An Exchange. Throws Error(kUnavailable).
  virtual void exchange(std::span<const std::span<const std::byte>> sends,
                        std::span<const std::span<std::byte>> receives) = 0;
  /// Informs the other ranks, if it can, why this rank leaves.
  virtual void abort(const std::string& why) = 0;
  /// The transport of GPU memory; null: ranks have to open each other's memory.
  virtual GpuTransport* gpu_transport() { return nullptr; }
};

}  // namespace fulgur::distributed
