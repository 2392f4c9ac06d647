#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace fulgur::cuda {

/// A library opened at run time. It stays open for the life of the process: CUDA's libraries have
/// threads of their own.
struct SharedLibrary {
  void* handle = nullptr;
  std::filesystem::path path;  ///< where it was found
  std::string searched;        ///< names and places tried, for an error

  explicit operator bool() const { return handle != nullptr; }
  /// The address of a symbol, null when the library lacks it.
  void* symbol(const char* name) const;
};

/// The first of `names` on the loader's path, else the first in one of `folders`.
SharedLibrary open_library(std::span<const char* const> names,
                           std::span<const std::filesystem::path> folders);

/// Existing folders where a toolkit keeps its libraries: CUDA_HOME and CUDA_PATH, /usr/local/cuda*,
/// then the nvidia packages of Python environments (VIRTUAL_ENV, around this library, around each
/// folder of PATH, of the system, of the user).
std::vector<std::filesystem::path> toolkit_folders();

}  // namespace fulgur::cuda
