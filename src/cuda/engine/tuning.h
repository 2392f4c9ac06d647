#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/common/family.h"
#include "cuda/device/gpu.h"
#include "cuda/jit/cache_folder.h"

namespace fulgur::cuda {

/// What a measurement of tiles holds for: a device model, the kernels as compiled here, and a class
/// of shapes; lines of text.
std::string tuning_key(Gpu& gpu, const Problem& problem);

/// Measurements of tiles in a cache folder, one file a key; the last one of a key counts. Each file
/// is read once in a process.
class Tunings {
 public:
  explicit Tunings(CacheFolder folder) : folder_(std::move(folder)) {}

  /// Those of the default folder.
  static Tunings& here();

  /// What was measured; empty when nothing was. A file that cannot be used costs a warning.
  std::vector<MeasuredTile> find(const std::string& key);

  /// Keeps what was measured. Throws Error(kUnavailable) when the folder cannot be used.
  void keep(const std::string& key, std::vector<MeasuredTile> tiles);

  /// Where a key's tiles are kept.
  std::filesystem::path path(const std::string& key) const;

  /// A number that changes when any measurement of this process is kept.
  static uint64_t generation();

  const CacheFolder& folder() const { return folder_; }

 private:
  std::vector<MeasuredTile> read(const std::string& key) const;

  CacheFolder folder_;
  std::mutex mutex_;
  std::map<std::string, std::vector<MeasuredTile>> known_;
};

}  // namespace fulgur::cuda
