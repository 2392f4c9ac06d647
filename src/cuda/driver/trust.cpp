#include "cuda/driver/trust.h"

#include <fmt/format.h>
#include <grp.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace fulgur::cuda {

namespace fs = std::filesystem;

namespace {

/// Whether only this user is in a group: Debian, Ubuntu and Fedora give each user a group of the
/// same number, which may write the user's files (umask 002).
bool is_private(gid_t group) {
  if (group != geteuid() || group == 0) return false;
  std::array<char, 4096> text;
  struct group entry, *found = nullptr;
  return getgrgid_r(group, &entry, text.data(), text.size(), &found) == 0 &&
         (found == nullptr || found->gr_mem[0] == nullptr);
}

}  // namespace

std::string trusted_environment(const char* name) {
  const char* const value = secure_getenv(name);
  return value == nullptr ? "" : value;
}

fs::path folder_in_environment(const char* name) {
  fs::path folder = trusted_environment(name);
  return folder.is_absolute() ? folder : fs::path();
}

std::string distrusted(const struct stat& info, const fs::path& path) {
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return fmt::format("{} belongs to another user", path.string());
  }
  const mode_t others = is_private(info.st_gid) ? S_IWOTH : S_IWGRP | S_IWOTH;
  if ((info.st_mode & others) != 0) {
    return fmt::format("{} is writable by other users (mode {:o})", path.string(),
                       info.st_mode & 07777);
  }
  return {};
}

std::string distrusted(const fs::path& path) {
  for (fs::path at = path;; at = at.parent_path()) {
    struct stat info;
    if (stat(at.c_str(), &info) != 0) return errno_text("examine", at);
    // In a sticky folder such as /tmp others can add files, but not replace those of other users.
    const bool keeps = at != path && (info.st_mode & S_ISVTX) != 0;
    if (keeps) info.st_mode &= ~static_cast<mode_t>(S_IWGRP | S_IWOTH);
    if (std::string why = distrusted(info, at); !why.empty()) return why;
    if (at == at.parent_path()) return {};
  }
}

std::string errno_text(const char* what, const fs::path& path) {
  return fmt::format("cannot {} {}: {}", what, path.string(), std::strerror(errno));
}

}  // namespace fulgur::cuda
