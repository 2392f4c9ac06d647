#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "cuda/sha256.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kFormat[] = "fulgur-cubin 1";

class File {
 public:
  File(const fs::path& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// Holds the right to make one entry, among threads and processes. The lock's file goes with it.
class EntryLock {
 public:
  explicit EntryLock(const fs::path& path) : path_(path) {
    for (;;) {
      file_.emplace(path_, O_RDWR | O_CREAT);
      if (!*file_) return;
      // A file system without locks: entries may be made twice, which only costs time.
      while (flock(file_->fd(), LOCK_EX) != 0 && errno == EINTR) {
      }
      struct stat mine, there;
      const bool current = fstat(file_->fd(), &mine) == 0 && stat(path_.c_str(), &there) == 0 &&
                           mine.st_ino == there.st_ino;
      if (current) return;  // otherwise its last holder removed the file while this one waited
    }
  }
  ~EntryLock() {
    if (*file_) unlink(path_.c_str());
  }
  EntryLock(const EntryLock&) = delete;
  EntryLock& operator=(const EntryLock&) = delete;
  explicit operator bool() const { return static_cast<bool>(*file_); }

 private:
  fs::path path_;
  std::optional<File> file_;
};

std::string errno_text(const char* what, const fs::path& path) {
  return fmt::format("cannot {} {}: {}", what, path.string(), std::strerror(errno));
}

/// Why the folder may hold what others wrote, which would be run; empty when it may not.
std::string distrusted(const fs::path& folder) {
  struct stat info;
  if (stat(folder.c_str(), &info) != 0) return {};
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return fmt::format("{} belongs to another user", folder.string());
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fmt::format("{} is writable by other users (mode {:o})", folder.string(),
                       info.st_mode & 0777);
  }
  return {};
}

std::string checksum(std::string_view log, std::string_view image) {
  return Sha256().add(log).add(image).hex();
}

}  // namespace

fs::path CubinCache::default_folder() {
  const auto environment = [](const char* name) {
    const char* value = std::getenv(name);
    return fs::path(value == nullptr ? "" : value);
  };
  if (const fs::path folder = environment("FULGUR_CACHE_DIR"); !folder.empty()) return folder;
  // The XDG specification: a relative path is to be ignored.
  if (const fs::path cache = environment("XDG_CACHE_HOME"); cache.is_absolute()) {
    return cache / "fulgur";
  }
  return environment("HOME") / ".cache" / "fulgur";
}

std::optional<Cubin> CubinCache::load(const std::string& key) const {
  std::ifstream file(folder_ / (key + ".cubin"), std::ios::binary);
  if (!file || !distrusted(folder_).empty()) return std::nullopt;
  std::string header;
  std::getline(file, header);
  const std::string rest(std::istreambuf_iterator<char>(file), {});
  char sum[65];
  unsigned long long log = 0, image = 0;
  if (!header.starts_with(kFormat) ||
      std::sscanf(header.c_str() + sizeof(kFormat) - 1, " %64s %llu %llu", sum, &log, &image) !=
          3 ||
      log > rest.size() || image != rest.size() - log) {
    return std::nullopt;
  }
  Cubin cubin{rest.substr(log), rest.substr(0, log)};
  if (checksum(cubin.log, cubin.image) != sum) return std::nullopt;
  return cubin;
}

std::string CubinCache::unusable() const {
  std::error_code error;
  if (!fs::is_directory(folder_, error)) {
    fs::create_directories(folder_.parent_path(), error);
    if (mkdir(folder_.c_str(), 0700) != 0 && errno != EEXIST) {
      return errno_text("make the folder", folder_);
    }
  }
  return distrusted(folder_);
}

std::string CubinCache::store(const std::string& key, const Cubin& cubin) const {
  std::string name = folder_ / (key + ".XXXXXX");
  const int made = mkostemp(name.data(), O_CLOEXEC);
  if (made < 0) return errno_text("write to", folder_);
  const std::string header = fmt::format("{} {} {} {}\n", kFormat, checksum(cubin.log, cubin.image),
                                         cubin.log.size(), cubin.image.size());
  const std::string all = header + cubin.log + cubin.image;
  size_t written = 0;
  while (written < all.size()) {
    const ssize_t n = write(made, all.data() + written, all.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  // The name must not become visible before the bytes are there, even across a crash.
  const bool complete = written == all.size() && fsync(made) == 0;
  std::string why;
  if (!complete) why = errno_text("write", name);
  close(made);
  if (complete && rename(name.c_str(), (folder_ / (key + ".cubin")).c_str()) != 0) {
    why = errno_text("rename", name);
  }
  if (!why.empty()) unlink(name.c_str());
  return why;
}

Cubin CubinCache::get(const std::string& key, const std::function<Cubin()>& build) {
  if (auto cubin = load(key)) return *std::move(cubin);
  if (const std::string why = unusable(); !why.empty()) {
    warn(why);
    return build();
  }
  const EntryLock lock(folder_ / (key + ".lock"));
  if (!lock) {
    warn(errno_text("write to", folder_));
    return build();
  }
  if (auto cubin = load(key)) return *std::move(cubin);  // another process was faster
  Cubin cubin = build();
  if (const std::string why = store(key, cubin); !why.empty()) warn(why);
  return cubin;
}

void CubinCache::warn(const std::string& why) {
  if (warned_.exchange(true)) return;
  fmt::print(stderr,
             "fulgur: kernels are compiled in every process, as they cannot be kept: {} "
             "(FULGUR_CACHE_DIR names another folder)\n",
             why);
}

}  // namespace fulgur::cuda
