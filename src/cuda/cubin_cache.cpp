#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

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

}  // namespace

std::optional<Cubin> CubinCache::load(const std::string& key) const {
  std::string why;  // a damaged entry is made anew, and `get` says what is wrong with the folder
  const std::optional<std::string> content = folder_.load(key + ".cubin", &why);
  if (!content) return std::nullopt;
  // The size of the log, the log, the image.
  size_t log = 0;
  const char *begin = content->data(), *end = begin + content->size();
  const char* const after = std::from_chars(begin, end, log).ptr;
  const auto rest = static_cast<size_t>(end - after);
  if (rest == 0 || *after != '\n' || log > rest - 1) return std::nullopt;
  return Cubin{std::string(after + 1 + log, end), std::string(after + 1, log)};
}

Cubin CubinCache::get(const std::string& key, const std::function<Cubin()>& build) {
  if (auto cubin = load(key)) return *std::move(cubin);
  if (const std::string why = folder_.unusable(); !why.empty()) {
    warn(why);
    return build();
  }
  const EntryLock lock(folder_.path() / (key + ".lock"));
  if (!lock) {
    warn(errno_text("write to", folder_.path()));
    return build();
  }
  if (auto cubin = load(key)) return *std::move(cubin);  // another process was faster
  Cubin cubin = build();
  const std::string content = fmt::format("{}\n{}", cubin.log.size(), cubin.log + cubin.image);
  if (const std::string why = folder_.store(key + ".cubin", content); !why.empty()) warn(why);
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
