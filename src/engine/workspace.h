#pragma once

#include <cstdint>

namespace fulgur {

/// Alignment in bytes of a call's workspace, and of everything that is laid out in it.
inline constexpr int64_t kWorkspaceAlignment = 256;

/// `bytes` rounded up, so that what follows is aligned.
constexpr int64_t workspace_aligned(int64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace fulgur
