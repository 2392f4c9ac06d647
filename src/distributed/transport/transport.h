/// What carries the bytes of a group.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace fulgur::distributed {

/// Carries memory of a GPU, in the order of a stream of its.
class GpuTransport {
 public:
  static constexpr int kAnyDevice = -1;
  virtual ~GpuTransport() = default;
  virtual int device() const = 0;
  /// An Exchange of what lies there. Waits until it is done. Throws Error(kUnavailable).
  virtual void exchange(std::span<const std::span<const std::byte>> sends,
                        std::span<const std::span<std::byte>> receives, void* stream) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// An Exchange. Throws Error(kUnavailable).
  virtual void exchange(std::span<const std::span<const std::byte>> sends,
                        std::span<const std::span<std::byte>> receives) = 0;
  /// Tells the others, where it can, why this rank makes no further step.
  virtual void abort(const std::string& why) = 0;
  /// What carries memory of GPUs, too; null: ranks have to open each other's.
  virtual GpuTransport* of_gpus() { return nullptr; }
};

}  // namespace fulgur::distributed
