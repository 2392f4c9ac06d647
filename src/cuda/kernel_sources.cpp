#include "cuda/kernel_sources.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "cuda/sha256.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

KernelSources read_folder(const fs::path& folder) {
  KernelSources sources;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(folder, error)) {
    const std::string type = entry.path().extension();
    if (type != ".cu" && type != ".cuh" && type != ".h") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    sources[fs::relative(entry.path(), folder).generic_string()] =
        std::string(std::istreambuf_iterator<char>(file), {});
  }
  if (error || sources.empty()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("FULGUR_KERNEL_DIR: got {}: {}; want a folder of kernel sources",
                            folder.string(), error ? error.message() : "no kernel in it"));
  }
  return sources;
}

}  // namespace

const KernelSources& kernel_sources() {
  static const KernelSources kSources = [] {
    const char* folder = std::getenv("FULGUR_KERNEL_DIR");
    return folder == nullptr || *folder == 0 ? embedded_sources() : read_folder(folder);
  }();
  return kSources;
}

std::string digest(const KernelSources& sources) {
  Sha256 hash;
  for (const auto& [name, text] : sources) {
    hash.add(fmt::format("{}\n{}\n", name, text.size())).add(text);
  }
  return hash.hex();
}

}  // namespace fulgur::cuda
