#include "cuda/jit/cubin_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>

#include "cuda/driver/trust.h"

namespace fulgur::cuda {
namespace {

/// A lock among threads and processes for making an entry. Its file is removed with it.
class EntryLock {
 public:
  EntryLock(const Descriptor& folder, std::string name) : folder_(folder), name_(std::move(name)) {
    for (;;) {
      file_ = Descriptor(
          openat(folder_.get(), name_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
      if (!file_) return;
      // On a file system without locks entries may be made twice, which only costs time.
      while (flock(file_.get(), LOCK_EX) != 0 && errno == EINTR) {
      }
      struct stat mine, there;
      const bool current =
          fstat(file_.get(), &mine) == 0 &&
          fstatat(folder_.get(), name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
          mine.st_ino == there.st_ino;
      if (current) return;  // otherwise the last holder has removed the file meanwhile
    }
  }
  ~EntryLock() {
    if (file_) unlinkat(folder_.get(), name_.c_str(), 0);
  }
  EntryLock(const EntryLock&) = delete;
  EntryLock& operator=(const EntryLock&) = delete;
  explicit operator bool() const { return static_cast<bool>(file_); }

 private:
  const Descriptor& folder_;
  std::string name_;
  Descriptor file_{-1};
};

}  // namespace

std::optional<Cubin> CubinCache::load(const std::string& key) const {
  std::string why;  // not used: a damaged entry is made again, and get() warns of the folder
  const std::optional<std::string> content = folder_.load(key + ".cubin", &why);
  if (!content) return std::nullopt;
  // An entry consists of the size of the log, the log, and the image.
  size_t log = 0;
  const char *begin = content->data(), *end = begin + content->size();
  const char* const after = std::from_chars(begin, end, log).ptr;
  const auto rest = static_cast<size_t>(end - after);
  if (rest == 0 || *after != '\n' || log > rest - 1) return std::nullopt;
  return Cubin{std::string(after + 1 + log, end), std::string(after + 1, log)};
}

Cubin CubinCache::get(const std::string& key, const std::function<Cubin()>& build) {
  if (auto cubin = load(key)) return *std::move(cubin);
  std::string why;
  const Descriptor folder = folder_.open(true, &why);
  if (!folder) {
    warn(why);
    return build();
  }
  const EntryLock lock(folder, key + ".lock");
  if (!lock) {
    warn(errno_text("write to", folder_.path()));
    return build();
  }
  if (auto cubin = load(key)) return *std::move(cubin);  // made by another process meanwhile
  Cubin cubin = build();
  const std::string content = fmt::format("{}\n{}", cubin.log.size(), cubin.log + cubin.image);
  why = folder_.store(key + ".cubin", content);
  if (!why.empty()) warn(why);
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
