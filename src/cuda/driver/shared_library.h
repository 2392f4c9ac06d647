#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace fulgur::cuda {

/// A library that is opened at run time. It is never closed, because CUDA's libraries have threads
/// of their own.
struct SharedLibrary {
  void* handle = nullptr;
  std::filesystem::path path;  ///< where it was found
  std::string searched;        ///< for an error: names and places that were tried, and the reasons

  explicit operator bool() const { return handle != nullptr; }
  /// The address of a symbol; null if the library lacks it.
  void* symbol(const char* name) const;
};

/// Why an open library cannot be used; empty if it can.
using Refusal = std::function<std::string(const SharedLibrary&)>;

/// The first library that opens and is not refused. `places` are tried in order, and in each of
/// them `names` in order. A place is a folder or, if empty, the loader's path. Files in folders
/// that other users may have written are skipped.
SharedLibrary open_library(std::span<const char* const> names,
                           std::span<const std::filesystem::path> places,
                           const Refusal& refused = {});

/// Opens a library that no users but this one and root can have changed. Returns null, and sets
/// `why`, if others can, or if it does not open.
void* open_trusted(const std::filesystem::path& file, int flags, std::string& why);

/// The absolute path of this library; empty if it is unknown.
std::filesystem::path own_path();

/// The existing folders of CUDA libraries, in the order in which they are tried: those that the
/// user names (CUDA_HOME, CUDA_PATH); the nvidia packages of the site-packages folder that contains
/// this library (`own`); the loader's path and /usr/local/cuda*; then the nvidia packages of other
/// Python environments: VIRTUAL_ENV, that of each python3 in PATH, the system's and the user's.
std::vector<std::filesystem::path> toolkit_places(const std::filesystem::path& own = own_path());

}  // namespace fulgur::cuda
