#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>

#include "cuda/jit/cache_folder.h"
#include "cuda/jit/nvrtc.h"

namespace fulgur::cuda {

/// Compiled kernels in a cache folder, one file a key, made by one process at a time; a folder that
/// cannot be used costs a warning and a compilation.
class CubinCache {
 public:
  explicit CubinCache(CacheFolder folder) : folder_(std::move(folder)) {}

  /// The entry of a key, or what `build` returns, stored. An exception of `build` stores nothing.
  Cubin get(const std::string& key, const std::function<Cubin()>& build);

  /// The entry of a key; none when there is none or it is damaged.
  std::optional<Cubin> load(const std::string& key) const;

  const CacheFolder& folder() const { return folder_; }

 private:
  void warn(const std::string& why);

  CacheFolder folder_;
  std::atomic<bool> warned_ = false;
};

}  // namespace fulgur::cuda
