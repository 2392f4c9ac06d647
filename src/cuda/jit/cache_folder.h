#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

namespace fulgur::cuda {

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// A folder of this user (mode 0700) for files that can be made again. A file appears complete or
/// not at all, and has a checksum.
///
/// Each call opens the folder, checks the open folder, and accesses files relative to it, so that
/// another folder that is moved to its path meanwhile is never used. Folders above it may be links,
/// but the folder itself may not.
class CacheFolder {
 public:
  CacheFolder(std::filesystem::path path);

  /// FULGUR_CACHE_DIR, else fulgur/ in XDG_CACHE_HOME, else ~/.cache/fulgur. Without a home, or if
  /// FULGUR_CACHE_DIR is a relative path, there is no folder: unusable() returns the reason.
  static CacheFolder standard();

  /// A file's content. None if there is no such file, or if it must not be used: then `why` is set.
  std::optional<std::string> load(const std::string& name, std::string* why) const;

  /// Writes or replaces a file in a usable folder. Returns why that failed, or an empty text.
  std::string store(const std::string& name, const std::string& content) const;

  /// Makes the folder. Returns why it cannot be used, or an empty text.
  std::string unusable() const;

  /// Opens the folder, after making it if `make`. None if it does not exist or cannot be used; in
  /// the latter case `why` is set.
  Descriptor open(bool make, std::string* why) const;

  /// Empty if there is no folder.
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::string why_none_;
};

}  // namespace fulgur::cuda
