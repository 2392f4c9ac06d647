#include "cuda/cache_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "cuda/sha256.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

/// Why the folder may hold what others wrote, which would be trusted; empty when it may not.
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

/// The first line of a file.
std::string header(std::string_view content) {
  return fmt::format("fulgur-cache 2 {}\n", Sha256().add(content).hex());
}

}  // namespace

std::string errno_text(const char* what, const fs::path& path) {
  return fmt::format("cannot {} {}: {}", what, path.string(), std::strerror(errno));
}

fs::path CacheFolder::default_path() {
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

std::optional<std::string> CacheFolder::load(const std::string& name, std::string* why) const {
  errno = 0;
  std::ifstream file(path_ / name, std::ios::binary);
  if (!file) {
    if (errno != ENOENT && errno != ENOTDIR) *why = errno_text("read", path_ / name);
    return std::nullopt;
  }
  if (*why = distrusted(path_); !why->empty()) return std::nullopt;
  const std::string all(std::istreambuf_iterator<char>(file), {});
  const size_t line = all.find('\n') + 1;  // 0 without one
  std::string content = all.substr(line);
  if (all.substr(0, line) != header(content)) {
    *why = fmt::format("{} is damaged", (path_ / name).string());
    return std::nullopt;
  }
  return content;
}

std::string CacheFolder::unusable() const {
  std::error_code error;
  if (!fs::is_directory(path_, error)) {
    fs::create_directories(path_.parent_path(), error);
    if (mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST) {
      return errno_text("make the folder", path_);
    }
  }
  return distrusted(path_);
}

std::string CacheFolder::store(const std::string& name, const std::string& content) const {
  std::string made_name = path_ / (name + ".XXXXXX");
  const int made = mkostemp(made_name.data(), O_CLOEXEC);
  if (made < 0) return errno_text("write to", path_);
  const std::string all = header(content) + content;
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
  if (!complete) why = errno_text("write", made_name);
  close(made);
  if (complete && rename(made_name.c_str(), (path_ / name).c_str()) != 0) {
    why = errno_text("rename", made_name);
  }
  if (!why.empty()) unlink(made_name.c_str());
  return why;
}

}  // namespace fulgur::cuda
