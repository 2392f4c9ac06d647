#pragma once

#include <cstdint>

namespace fulgur::host {

/// Uninitialized memory of one run, aligned to kAlignment. What earlier runs gave back is
/// used again, as fresh pages cost more than many a run; a bounded amount of it is kept.
class ScratchMemory {
 public:
  static constexpr int64_t kAlignment = 64;

  /// Throws Error(kOutOfMemory).
  explicit ScratchMemory(int64_t bytes);
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace fulgur::host
