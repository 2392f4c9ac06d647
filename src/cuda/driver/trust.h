#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <string>

// Only its user and root may decide what this process loads and executes.
namespace fulgur::cuda {

/// The value of an environment variable that decides what is loaded or executed, or where files are
/// written. Empty if it is not set, and in a process with privileges that its caller lacks
/// (set-user-ID and the like).
std::string trusted_environment(const char* name);

/// The folder that such a variable names; empty for a relative path, which would depend on the
/// current folder of the process.
std::filesystem::path folder_in_environment(const char* name);

/// Why users other than this one and root may change the file of `info`; empty if they cannot.
std::string distrusted(const struct stat& info, const std::filesystem::path& path);

/// The same for the file at an absolute path and every folder above it: users who may write a
/// folder can replace what is in it.
std::string distrusted(const std::filesystem::path& path);

/// A message with the text of errno: "cannot write to /x: Permission denied".
std::string errno_text(const char* what, const std::filesystem::path& path);

}  // namespace fulgur::cuda
