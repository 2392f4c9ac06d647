#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <string>

// What this process loads and executes is decided by its user and by root, by nobody else.
namespace fulgur::cuda {

/// An environment variable that decides what is loaded or executed, or where is written: empty when
/// it is not set, and in a process with rights that its caller lacks (set-user-ID and the like).
std::string trusted_environment(const char* name);

/// The folder that such a variable names; empty for a relative path, which would depend on where
/// the process happens to stand.
std::filesystem::path folder_in_environment(const char* name);

/// Why users other than this one and root may change what `info` describes; empty when they cannot.
std::string distrusted(const struct stat& info, const std::filesystem::path& path);

/// The same of what lies at an absolute path and of every folder on the way there: whoever may
/// write one of these can put something else in its place.
std::string distrusted(const std::filesystem::path& path);

/// "cannot write to /x: Permission denied", of errno.
std::string errno_text(const char* what, const std::filesystem::path& path);

}  // namespace fulgur::cuda
