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

/// A folder of this user (mode 0700) for what can be made again. A file appears complete or not at
/// all, and carries a checksum.
///
/// Each call opens the folder, judges what it has opened, and reaches files through it alone:
/// another folder that takes its name meanwhile is none of them. Links may lead to the folder, but
/// its own name is none.
class CacheFolder {
 public:
  CacheFolder(std::filesystem::path path);

  /// FULGUR_CACHE_DIR, else fulgur/ in XDG_CACHE_HOME, else ~/.cache/fulgur. Without a home, or
  /// where FULGUR_CACHE_DIR is a relative path, none: unusable() says why.
  static CacheFolder standard();

  /// A file's content; none when there is no such file, or one that must not be used: `why` takes
  /// the reason.
  std::optional<std::string> load(const std::string& name, std::string* why) const;

  /// Writes a file, or replaces it, in a folder that is usable. Why that failed; empty when it did
  /// not.
  std::string store(const std::string& name, const std::string& content) const;

  /// Makes the folder. Why it cannot be used; empty when it can.
  std::string unusable() const;

  /// The open folder, made if `make`; none where it cannot be used, and `why` takes the reason.
  /// That it is not there is no reason.
  Descriptor open(bool make, std::string* why) const;

  /// Empty where there is none.
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::string why_none_;
};

}  // namespace fulgur::cuda
