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

/// The lines of text that identify what a measurement of tiles holds for: a device model, the
/// compiled kernels, and a shape class.
std::string tuning_key(Gpu& gpu, const Problem& problem);

/// Measurements of tiles in a cache folder, one file per key, which holds the last measurement.
/// Each file is read once in a process.
class Tunings {
 public:
  explicit Tunings(CacheFolder folder) : folder_(std::move(folder)) {}

  /// The measurements in the default folder.
  static Tunings& here();

  /// The measured tiles of a key; empty if there are none. Warns of a file that cannot be used.
  std::vector<MeasuredTile> find(const std::string& key);

  /// Stores measured tiles. Throws Error(kUnavailable) if the folder cannot be used.
  void keep(const std::string& key, std::vector<MeasuredTile> tiles);

  /// The file of a key.
  std::filesystem::path path(const std::string& key) const;

  /// A number that changes whenever this process stores a measurement.
  static uint64_t generation();

  const CacheFolder& folder() const { return folder_; }

 private:
  std::vector<MeasuredTile> read(const std::string& key) const;

  CacheFolder folder_;
  std::mutex mutex_;
  std::map<std::string, std::vector<MeasuredTile>> known_;
};

}  // namespace fulgur::cuda
