#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "cuda/nvrtc.h"

namespace fulgur::cuda {

/// Compiled kernels in a folder of this user (mode 0700), one file a key. A file appears complete
/// or not at all, carries a checksum, and is made by one process at a time; a folder that cannot be
/// used costs a warning and a compilation.
class CubinCache {
 public:
  explicit CubinCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// FULGUR_CACHE_DIR, else fulgur/ in XDG_CACHE_HOME, else ~/.cache/fulgur.
  static std::filesystem::path default_folder();

  /// The entry of a key, or what `build` returns, stored. An exception of `build` stores nothing.
  Cubin get(const std::string& key, const std::function<Cubin()>& build);

  /// The entry of a key; none when there is none or it is damaged.
  std::optional<Cubin> load(const std::string& key) const;

  /// Makes the folder. Why it cannot be used; empty when it can.
  std::string unusable() const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::string store(const std::string& key, const Cubin& cubin) const;
  void warn(const std::string& why);

  std::filesystem::path folder_;
  std::atomic<bool> warned_ = false;
};

}  // namespace fulgur::cuda
