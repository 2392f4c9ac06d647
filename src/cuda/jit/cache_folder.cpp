#include "cuda/jit/cache_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "cuda/driver/trust.h"
#include "cuda/jit/sha256.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

/// The first line of a file: the checksum of its content.
std::string header(std::string_view content) {
  return fmt::format("fulgur-cache 2 {}\n", Sha256().add(content).hex());
}

Descriptor open_folder(const fs::path& path) {
  return Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

/// Makes a folder, and missing folders above it, with access for this user only. Returns the errno
/// of the first error, or 0.
int make_folder(const fs::path& path) {
  int error = 0;
  fs::path made;
  for (const fs::path& part : path) {
    made /= part;
    if (mkdir(made.c_str(), 0700) != 0 && errno != EEXIST && error == 0) error = errno;
  }
  return error;
}

/// The content of a file, up to the first error.
std::string read_all(int fd) {
  std::string all;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return all;
    all.append(buffer, static_cast<size_t>(n));
  }
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

/// Creates a file of a new name; none if that fails.
std::pair<Descriptor, std::string> create(const Descriptor& folder, const std::string& name) {
  for (int i = 0;; ++i) {
    std::string made = fmt::format("{}.{}.{}.tmp", name, getpid(), i);
    Descriptor file(openat(folder.get(), made.c_str(),
                           O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file || errno != EEXIST) return {std::move(file), std::move(made)};
  }
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

// Without a slash at the end, so that mkdir and O_NOFOLLOW apply to the folder itself.
CacheFolder::CacheFolder(fs::path path)
    : path_(path.has_filename() ? std::move(path) : path.parent_path()) {}

CacheFolder CacheFolder::standard() {
  CacheFolder none{fs::path()};
  if (const std::string own = trusted_environment("FULGUR_CACHE_DIR"); !own.empty()) {
    if (fs::path(own).is_absolute()) return fs::path(own);
    none.why_none_ = fmt::format("FULGUR_CACHE_DIR: got \"{}\", want an absolute path", own);
    return none;
  }
  // By the XDG specification a relative path is ignored.
  if (const fs::path cache = folder_in_environment("XDG_CACHE_HOME"); !cache.empty()) {
    return cache / "fulgur";
  }
  if (const fs::path home = folder_in_environment("HOME"); !home.empty()) {
    return home / ".cache" / "fulgur";
  }
  none.why_none_ =
      "there is no cache folder: neither FULGUR_CACHE_DIR nor HOME is an absolute path";
  return none;
}

Descriptor CacheFolder::open(bool make, std::string* why) const {
  why->clear();
  if (path_.empty()) {
    if (make) *why = why_none_;
    return Descriptor(-1);
  }
  Descriptor folder = open_folder(path_);
  int error = errno;
  const char* failed = "open the folder";
  if (!folder && make && error == ENOENT) {
    failed = "make the folder";
    error = make_folder(path_);
    folder = open_folder(path_);
    if (error == 0) error = errno;
  }
  struct stat info;
  if (!folder) {
    if (lstat(path_.c_str(), &info) == 0 && S_ISLNK(info.st_mode)) {
      *why = fmt::format("{} is a symbolic link; want a folder", path_.string());
    } else if (make || (error != ENOENT && error != ENOTDIR)) {
      errno = error;
      *why = errno_text(failed, path_);
    }
    return folder;
  }
  *why = fstat(folder.get(), &info) == 0 ? distrusted(info, path_) : errno_text("examine", path_);
  return why->empty() ? std::move(folder) : Descriptor(-1);
}

std::optional<std::string> CacheFolder::load(const std::string& name, std::string* why) const {
  const Descriptor folder = open(false, why);
  if (!folder) return std::nullopt;
  const fs::path path = path_ / name;
  // O_NONBLOCK, because opening a pipe must not wait for its writer.
  const Descriptor file(
      openat(folder.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (!file || fstat(file.get(), &info) != 0) {
    if (errno != ENOENT) *why = errno_text("read", path);
    return std::nullopt;
  }
  *why = S_ISREG(info.st_mode) ? distrusted(info, path) : path.string() + " is not a regular file";
  if (!why->empty()) return std::nullopt;
  const std::string all = read_all(file.get());
  const size_t line = all.find('\n') + 1;  // 0 if there is none
  std::string content = all.substr(line);
  if (all.substr(0, line) != header(content)) {
    *why = path.string() + " is damaged";
    return std::nullopt;
  }
  return content;
}

std::string CacheFolder::unusable() const {
  std::string why;
  open(true, &why);
  return why;
}

std::string CacheFolder::store(const std::string& name, const std::string& content) const {
  std::string why;
  const Descriptor folder = open(true, &why);
  if (!folder) return why;
  const auto [file, made] = create(folder, name);
  if (!file) return errno_text("write to", path_);
  // The name must not become visible before the bytes are there, even across a crash.
  if (!write_all(file.get(), header(content) + content) || fsync(file.get()) != 0) {
    why = errno_text("write", path_ / made);
  } else if (renameat(folder.get(), made.c_str(), folder.get(), name.c_str()) != 0) {
    why = errno_text("rename", path_ / made);
  }
  if (!why.empty()) unlinkat(folder.get(), made.c_str(), 0);
  return why;
}

}  // namespace fulgur::cuda
