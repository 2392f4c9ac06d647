#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>

#include "cuda/jit/cache_folder.h"
#include "cuda/jit/nvrtc.h"

namespace fulgur::cuda {

/// Compiled kernels in a cache folder, one file per key, each made by one process at a time. If the
/// folder cannot be used, it warns, and kernels are compiled in every process.
class CubinCache {
 public:
  explicit CubinCache(CacheFolder folder) : folder_(std::move(folder)) {}

  /// The entry of a key, or else the result of `build`, which is stored. Exceptions of `build` are
  /// passed on, and nothing is stored.
  Cubin get(const std::string& key, const std::function<Cubin()>& build);

  /// The entry of a key; none if it does not exist or is damaged.
  std::optional<Cubin> load(const std::string& key) const;

  const CacheFolder& folder() const { return folder_; }

 private:
  void warn(const std::string& why);

  CacheFolder folder_;
  std::atomic<bool> warned_ = false;
};

}  // namespace fulgur::cuda
