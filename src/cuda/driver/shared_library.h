#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace fulgur::cuda {

/// A library opened at run time. It stays open for the life of the process: CUDA's libraries have
/// threads of their own.
struct SharedLibrary {
  void* handle = nullptr;
  std::filesystem::path path;  ///< where it was found
  std::string searched;        ///< names and places tried, and what was wrong there, for an error

  explicit operator bool() const { return handle != nullptr; }
  /// The address of a symbol, null when the library lacks it.
  void* symbol(const char* name) const;
};

/// Why an open library cannot be used; empty when it can.
using Refusal = std::function<std::string(const SharedLibrary&)>;

/// The first library that opens and is not refused: of the first of `places` that has one, by the
/// first of `names`. A place is a folder or, empty, the loader's path. In folders, files that other
/// users may have written are passed over.
SharedLibrary open_library(std::span<const char* const> names,
                           std::span<const std::filesystem::path> places,
                           const Refusal& refused = {});

/// Opens a file that only this user and root may have written, or lead to. Null, and why, else.
void* open_trusted(const std::filesystem::path& file, int flags, std::string& why);

/// Where the code of this library lies: an absolute path, or empty.
std::filesystem::path own_path();

/// Where a toolkit keeps its libraries, existing folders in the order in which they are to be
/// asked: what the user names, CUDA_HOME and CUDA_PATH; what was installed with this library, the
/// nvidia packages of the site-packages folder that holds it, `own`; what the system has, the
/// loader's path and /usr/local/cuda*; at last the nvidia packages of other Python environments:
/// VIRTUAL_ENV, around each python3 in PATH, of the system, of the user.
std::vector<std::filesystem::path> toolkit_places(const std::filesystem::path& own = own_path());

}  // namespace fulgur::cuda
