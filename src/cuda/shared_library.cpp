#include "cuda/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <sstream>

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Entries of `folder` whose names start with `prefix`, the last in the alphabet first: the newest
/// version. None when there is no such folder.
std::vector<fs::path> entries(const fs::path& folder, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    if (entry.path().filename().string().starts_with(prefix)) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  return found;
}

class Folders {
 public:
  /// A toolkit's root.
  void add_toolkit(const fs::path& root) {
    for (const char* below : {"lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"})
      add(root / below);
  }
  /// A folder of Python packages.
  void add_packages(const fs::path& packages) {
    for (const fs::path& package : entries(packages / "nvidia", "")) add(package / "lib");
  }
  /// The root of a Python installation or environment.
  void add_python(const fs::path& root) {
    for (const fs::path& version : entries(root / "lib", "python3")) {
      add_packages(version / "site-packages");
      add_packages(version / "dist-packages");
    }
  }
  std::vector<fs::path> take() { return std::move(folders_); }

 private:
  void add(const fs::path& folder) {
    std::error_code none;
    const fs::path real = fs::canonical(folder, none);
    if (none || std::find(folders_.begin(), folders_.end(), real) != folders_.end()) return;
    folders_.push_back(real);
  }

  std::vector<fs::path> folders_;
};

/// Where the code of this library lies.
fs::path own_path() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&own_path), &info) == 0 || info.dli_fname == nullptr) {
    return {};
  }
  return fs::absolute(info.dli_fname);
}

fs::path path_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? fs::path(map->l_name) : fs::path();
}

}  // namespace

void* SharedLibrary::symbol(const char* name) const { return dlsym(handle, name); }

SharedLibrary open_library(std::span<const char* const> names, std::span<const fs::path> folders) {
  SharedLibrary library;
  const auto open = [&](const fs::path& file) {
    library.handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) library.path = path_of(library.handle);
    return static_cast<bool>(library);
  };
  for (const char* name : names) {
    library.searched += (library.searched.empty() ? "" : ", ") + std::string(name);
    if (open(name)) return library;
  }
  library.searched += " on the loader's path";
  for (const fs::path& folder : folders) {
    library.searched += ", in " + folder.string();
    for (const char* name : names) {
      std::error_code none;
      if (!fs::exists(folder / name, none)) continue;
      if (open(folder / name)) return library;
      library.searched += fmt::format(" ({})", dlerror());
    }
  }
  return library;
}

std::vector<fs::path> toolkit_folders() {
  Folders folders;
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string root = environment(name); !root.empty()) folders.add_toolkit(root);
  }
  folders.add_toolkit("/usr/local/cuda");
  for (const fs::path& root : entries("/usr/local", "cuda-")) folders.add_toolkit(root);

  if (const std::string root = environment("VIRTUAL_ENV"); !root.empty()) folders.add_python(root);
  // A Python module lies in site-packages/fulgur, or beside nvidia in site-packages.
  for (fs::path at = own_path().parent_path(); at.has_relative_path(); at = at.parent_path()) {
    folders.add_packages(at);
  }
  std::istringstream path(environment("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    std::error_code none;
    const fs::path python = fs::path(folder) / "python3";
    if (!fs::exists(python, none)) continue;
    folders.add_python(fs::path(folder).parent_path());
    folders.add_python(fs::canonical(python, none).parent_path().parent_path());
  }
  folders.add_python("/usr");
  folders.add_python("/usr/local");
  if (const std::string home = environment("HOME"); !home.empty()) {
    folders.add_python(fs::path(home) / ".local");
  }
  return folders.take();
}

}  // namespace fulgur::cuda
