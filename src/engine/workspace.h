#pragma once

#include <cstdint>

namespace fulgur {

/// Alignment in bytes of a call's workspace, and of everything that is laid out in it.
inline constexpr int64_t kWorkspaceAlignment = 256;

/// Lays out a workspace: its parts follow each other, aligned.
class Arena {
 public:
  /// After the first `begin` bytes.
  explicit constexpr Arena(int64_t begin = 0) : end_(begin) {}

  /// The offset of the next `bytes`.
  constexpr int64_t take(int64_t bytes) {
    const int64_t at = (end_ + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    if (bytes > 0) end_ = at + bytes;
    return at;
  }
  /// The bytes of all that was taken.
  constexpr int64_t end() const { return end_; }

 private:
  int64_t end_;
};

}  // namespace fulgur
