#include "cuda/driver/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <sstream>

#include "cuda/driver/trust.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

/// Entries of `folder` whose names start with `prefix`, in descending order, so that the newest
/// version is first. None if there is no such folder.
std::vector<fs::path> entries(const fs::path& folder, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code none;
  for (fs::directory_iterator entry(folder, none), end; entry != end; entry.increment(none)) {
    if (entry->path().filename().string().starts_with(prefix)) found.push_back(entry->path());
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  return found;
}

bool holds_packages(const fs::path& folder) {
  return folder.filename() == "site-packages" || folder.filename() == "dist-packages";
}

class Places {
 public:
  void add_loaders_path() { places_.emplace_back(); }
  /// Adds the library folders of a toolkit's root.
  void add_toolkit(const fs::path& root) {
    for (const char* below : {"lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"})
      add(root / below);
  }
  /// Adds the library folders of nvidia packages in a folder of Python packages.
  void add_packages(const fs::path& packages) {
    for (const fs::path& package : entries(packages / "nvidia", "")) add(package / "lib");
  }
  /// Adds those of a Python installation or environment.
  void add_python(const fs::path& root) {
    for (const fs::path& version : entries(root / "lib", "python3")) {
      add_packages(version / "site-packages");
      add_packages(version / "dist-packages");
    }
  }
  std::vector<fs::path> take() { return std::move(places_); }

 private:
  void add(const fs::path& folder) {
    std::error_code none;
    const fs::path real = fs::canonical(folder, none);
    if (none || std::find(places_.begin(), places_.end(), real) != places_.end()) return;
    places_.push_back(real);
  }

  std::vector<fs::path> places_;
};

fs::path path_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? fs::path(map->l_name) : fs::path();
}

/// The loader's error for a library on its path; empty if there is no such library.
std::string loader_error(const std::string& name) {
  const std::string error = dlerror();
  return error.starts_with(name + ": cannot open shared object file: No such file") ? "" : error;
}

}  // namespace

void* SharedLibrary::symbol(const char* name) const { return dlsym(handle, name); }

void* open_trusted(const fs::path& file, int flags, std::string& why) {
  std::error_code error;
  const fs::path real = fs::canonical(file, error);
  why = error ? fmt::format("{}: {}", file.string(), error.message())
              : distrusted(file.parent_path());
  if (why.empty()) why = distrusted(real);
  if (!why.empty()) return nullptr;
  void* const handle = dlopen(real.c_str(), flags);
  if (handle == nullptr) why = dlerror();
  return handle;
}

SharedLibrary open_library(std::span<const char* const> names, std::span<const fs::path> places,
                           const Refusal& refused) {
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL;
  SharedLibrary library{nullptr, {}, fmt::format("{}", fmt::join(names, ", "))};
  for (const fs::path& place : places) {
    library.searched += &place == places.data() ? " " : ", ";
    library.searched += place.empty() ? "on the loader's path" : "in " + place.string();
    for (const char* name : names) {
      std::error_code none;
      std::string why;
      if (place.empty()) {
        library.handle = dlopen(name, kFlags);
        if (!library) why = loader_error(name);
      } else if (fs::exists(place / name, none)) {
        library.handle = open_trusted(place / name, kFlags, why);
      }
      if (library) {
        library.path = path_of(library.handle);
        if (refused) why = refused(library);
        if (why.empty()) return library;
        dlclose(library.handle);
        library.handle = nullptr;
      }
      // Several names may be links to the same file, whose reason is added once.
      if (!why.empty() && library.searched.find(why) == std::string::npos) {
        library.searched += fmt::format(" ({})", why);
      }
    }
  }
  library.path.clear();
  return library;
}

fs::path own_path() {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(reinterpret_cast<void*>(&own_path), &info, reinterpret_cast<void**>(&map),
              RTLD_DL_LINKMAP) == 0) {
    return {};
  }
  std::error_code none;
  const fs::path name = map->l_name;  // empty for the program itself
  const fs::path path = name.empty() ? fs::read_symlink("/proc/self/exe", none) : name;
  return path.is_absolute() ? path : fs::path();
}

std::vector<fs::path> toolkit_places(const fs::path& own) {
  Places places;
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const fs::path root = folder_in_environment(name); !root.empty()) places.add_toolkit(root);
  }
  for (fs::path at = own.parent_path(); at.has_relative_path(); at = at.parent_path()) {
    if (holds_packages(at)) places.add_packages(at);
  }
  places.add_loaders_path();
  places.add_toolkit("/usr/local/cuda");
  for (const fs::path& root : entries("/usr/local", "cuda-")) places.add_toolkit(root);

  if (const fs::path root = folder_in_environment("VIRTUAL_ENV"); !root.empty()) {
    places.add_python(root);
  }
  std::istringstream path(trusted_environment("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    const fs::path python = fs::path(folder) / "python3";
    if (!python.is_absolute()) continue;  // an empty entry of PATH is the current folder
    std::error_code none;
    const fs::path real = fs::canonical(python, none);
    if (none) continue;
    places.add_python(python.parent_path().parent_path());
    places.add_python(real.parent_path().parent_path());
  }
  places.add_python("/usr");
  places.add_python("/usr/local");
  if (const fs::path home = folder_in_environment("HOME"); !home.empty()) {
    places.add_python(home / ".local");
  }
  return places.take();
}

}  // namespace fulgur::cuda
