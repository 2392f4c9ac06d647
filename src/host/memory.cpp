#include "host/memory.h"

#include <fmt/format.h>

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

#include "base/fork_mutex.h"
#include "fulgur/error.h"

namespace fulgur::host {
namespace {

constexpr int64_t kMaxKept = int64_t{64} << 20;
constexpr int64_t kMaxWaste = 4;  // a block serves no run that needs less than this part of it

/// Blocks that no run uses.
struct Kept {
  ForkMutex mutex;
  std::multimap<int64_t, void*> by_bytes;
  int64_t bytes = 0;
};

Kept& kept() {
  static constinit MadeOnce<Kept> made;
  return made.get([] { return Kept(); });
}

}  // namespace

ScratchMemory::ScratchMemory(int64_t bytes) {
  if (bytes == 0) return;
  bytes_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  {
    Kept& k = kept();
    const std::scoped_lock lock(k.mutex);
    const auto found = k.by_bytes.lower_bound(bytes_);
    if (found != k.by_bytes.end() && found->first <= kMaxWaste * bytes_) {
      bytes_ = found->first;
      data_ = found->second;
      k.bytes -= bytes_;
      k.by_bytes.erase(found);
      return;
    }
  }
  data_ = std::aligned_alloc(kAlignment, static_cast<size_t>(bytes_));
  if (data_ == nullptr) {
    throw Error(Status::kOutOfMemory, fmt::format("workspace: {} bytes not available", bytes_));
  }
}

ScratchMemory::~ScratchMemory() {
  if (data_ == nullptr) return;
  Kept& k = kept();
  const std::scoped_lock lock(k.mutex);
  if (bytes_ > kMaxKept) {
    std::free(data_);
    return;
  }
  // The largest go first: they come back least often.
  while (k.bytes + bytes_ > kMaxKept) {
    const auto largest = std::prev(k.by_bytes.end());
    k.bytes -= largest->first;
    std::free(largest->second);
    k.by_bytes.erase(largest);
  }
  k.by_bytes.emplace(bytes_, data_);
  k.bytes += bytes_;
}

}  // namespace fulgur::host
