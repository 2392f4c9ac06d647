#include "cuda/jit/sources.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

#include "cuda/driver/trust.h"
#include "cuda/jit/sha256.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_kernel_dir(const fs::path& got, const std::string& why) {
  throw Error(Status::kInvalidArgument,
              fmt::format("FULGUR_KERNEL_DIR: got {}: {}; want the absolute path of a folder of "
                          "kernel sources",
                          got.string(), why));
}

KernelSources read_folder(const fs::path& folder) {
  if (!folder.is_absolute()) fail_kernel_dir(folder, "it is relative");
  KernelSources sources;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (const fs::recursive_directory_iterator end; !error && entry != end; entry.increment(error)) {
    const fs::path path = entry->path(), type = path.extension();
    if (type != ".cu" && type != ".cuh" && type != ".h") continue;
    if (!fs::is_regular_file(path, error)) {
      fail_kernel_dir(folder,
                      fmt::format("{} {}", path.string(),
                                  error ? "cannot be read: " + error.message() : "is not a file"));
    }
    std::ifstream file(path, std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    if (!file.is_open() || file.bad()) fail_kernel_dir(folder, path.string() + " cannot be read");
    sources[path.lexically_relative(folder).generic_string()] = text;
  }
  if (error) fail_kernel_dir(folder, error.message());
  if (sources.empty()) fail_kernel_dir(folder, "there is no kernel in it");
  return sources;
}

/// The file that a line of text includes; empty if it includes none.
std::string included_by(const std::string& line) {
  constexpr const char* kBlanks = " \t";
  const size_t sign = line.find_first_not_of(kBlanks);
  if (sign == line.npos || line[sign] != '#') return {};
  const size_t word = line.find_first_not_of(kBlanks, sign + 1);
  if (word == line.npos || line.compare(word, 7, "include") != 0) return {};
  const size_t open = line.find_first_of("<\"", word);
  if (open == line.npos) return {};
  return line.substr(open + 1, line.find_first_of(">\"", open + 1) - open - 1);
}

}  // namespace

const KernelSources& kernel_sources() {
  static const KernelSources kSources = [] {
    const std::string folder = trusted_environment("FULGUR_KERNEL_DIR");
    return folder.empty() ? embedded_sources() : read_folder(folder);
  }();
  return kSources;
}

KernelSources sources_of(const KernelSources& sources, const std::string& kernel) {
  KernelSources read;
  std::vector<std::string> unread;
  const auto add = [&](const std::string& name, const std::string& why) {
    if (!sources.contains(name)) {
      throw Error(Status::kInternal,
                  fmt::format("the kernel sources lack {}, which {}", name, why));
    }
    if (read.emplace(name, sources.at(name)).second) unread.push_back(name);
  };
  add(kernel, "is to be compiled");
  while (!unread.empty()) {
    const std::string name = unread.back();
    unread.pop_back();
    std::istringstream text(sources.at(name));
    for (std::string line; std::getline(text, line);) {
      const std::string included = included_by(line);
      if (included.empty() || included == "kernel_config.h") continue;
      const bool system = line.find('<') != line.npos;
      if (!system || sources.contains(included)) add(included, name + " includes");
    }
  }
  return read;
}

std::string digest(const KernelSources& sources) {
  Sha256 hash;
  for (const auto& [name, text] : sources) {
    hash.add(fmt::format("{}\n{}\n", name, text.size())).add(text);
  }
  return hash.hex();
}

}  // namespace fulgur::cuda
