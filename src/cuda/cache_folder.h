#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace fulgur::cuda {

/// A folder of this user (mode 0700) for what can be made again. A file appears complete or not at
/// all, and carries a checksum.
class CacheFolder {
 public:
  explicit CacheFolder(std::filesystem::path path) : path_(std::move(path)) {}

  /// FULGUR_CACHE_DIR, else fulgur/ in XDG_CACHE_HOME, else ~/.cache/fulgur.
  static std::filesystem::path default_path();

  /// A file's content; none when there is no such file, or one that must not be used: `why` takes
  /// the reason.
  std::optional<std::string> load(const std::string& name, std::string* why) const;

  /// Writes a file, or replaces it, in a folder that is usable. Why that failed; empty when it did
  /// not.
  std::string store(const std::string& name, const std::string& content) const;

  /// Makes the folder. Why it cannot be used; empty when it can.
  std::string unusable() const;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// "cannot write to /x: Permission denied", of errno.
std::string errno_text(const char* what, const std::filesystem::path& path);

}  // namespace fulgur::cuda
