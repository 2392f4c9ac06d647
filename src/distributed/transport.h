/// What carries the bytes of a group.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace fulgur::distributed {

class Transport {
 public:
  virtual ~Transport() = default;
  /// An Exchange. Throws Error(kUnavailable).
  virtual void exchange(std::span<const std::span<const std::byte>> sends,
                        std::span<const std::span<std::byte>> receives) = 0;
  /// Tells the others, where it can, why this rank makes no further step.
  virtual void abort(const std::string& why) = 0;
};

}  // namespace fulgur::distributed
