#include "cuda/jit/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <vector>

#include "cuda/driver/driver.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

namespace fs = std::filesystem;

// Declarations of NVRTC, with the names of its reference.
using nvrtcResult = int;
using nvrtcProgram = struct ProgramHandle*;

#define FULGUR_NVRTC_FUNCTIONS(F)                                                                 \
  F(nvrtcVersion, (int* major, int* minor))                                                       \
  F(nvrtcGetNumSupportedArchs, (int* count))                                                      \
  F(nvrtcGetSupportedArchs, (int* capabilities))                                                  \
  F(nvrtcCreateProgram, (nvrtcProgram * program, const char* text, const char* name, int headers, \
                         const char* const* texts, const char* const* names))                     \
  F(nvrtcCompileProgram, (nvrtcProgram program, int count, const char* const* options))           \
  F(nvrtcGetProgramLogSize, (nvrtcProgram program, size_t * size))                                \
  F(nvrtcGetProgramLog, (nvrtcProgram program, char* log))                                        \
  F(nvrtcGetCUBINSize, (nvrtcProgram program, size_t * size))                                     \
  F(nvrtcGetCUBIN, (nvrtcProgram program, char* image))                                           \
  F(nvrtcGetPTXSize, (nvrtcProgram program, size_t * size))                                       \
  F(nvrtcGetPTX, (nvrtcProgram program, char* text))                                              \
  F(nvrtcDestroyProgram, (nvrtcProgram * program))

struct Functions {
#define FULGUR_MEMBER(name, arguments) nvrtcResult(*name) arguments = nullptr;
  FULGUR_NVRTC_FUNCTIONS(FULGUR_MEMBER)
#undef FULGUR_MEMBER
  const char* missing = nullptr;  ///< the name of a symbol that the library lacks

  Functions() = default;
  explicit Functions(const SharedLibrary& library) {
#define FULGUR_LOAD(symbol_name, arguments)                                            \
  symbol_name = reinterpret_cast<decltype(symbol_name)>(library.symbol(#symbol_name)); \
  if (symbol_name == nullptr) missing = #symbol_name;
    FULGUR_NVRTC_FUNCTIONS(FULGUR_LOAD)
#undef FULGUR_LOAD
  }

  /// The version as drivers count: 12040 is 12.4.
  int version() const {
    int major = 0, minor = 0;
    nvrtcVersion(&major, &minor);
    return 1000 * major + 10 * minor;
  }
};

/// Why an open NVRTC cannot be used; empty if it can.
std::string refused(const SharedLibrary& library, int driver_version) {
  const Functions api(library);
  const std::string where = library.path.string();
  if (api.missing != nullptr) return fmt::format("{} lacks {}", where, api.missing);
  const int version = api.version();
  if (version < kMinVersion) {
    return fmt::format("{} is {}; want 12.0 or newer", where, version_text(version));
  }
  if (driver_version != 0 && version / 1000 > driver_version / 1000) {
    return fmt::format("{} is {}; the driver, for CUDA {}, loads no code of a newer major version",
                       where, version_text(version), version_text(driver_version));
  }
  return {};
}

/// Opens the builtins of NVRTC. It asks the loader for them by name, which fails if their folder is
/// not on the loader's path, unless they are open already.
void open_builtins(const fs::path& folder) {
  std::error_code none;
  for (fs::directory_iterator entry(folder, none), end; entry != end; entry.increment(none)) {
    if (!entry->path().filename().string().starts_with("libnvrtc-builtins.so")) continue;
    std::string why;  // not used: NVRTC reports missing builtins when it compiles
    open_trusted(entry->path(), RTLD_NOW | RTLD_GLOBAL, why);
  }
}

struct Nvrtc {
  SharedLibrary library =
      open_nvrtc(toolkit_places(), driver_unavailable().empty() ? driver().version : 0);
  Functions api;
  std::string unavailable, identity;
  std::vector<int> capabilities;

  Nvrtc() {
    if (!library) {
      unavailable = fmt::format(
          "no NVRTC, the compiler of CUDA 12 or newer: looked for {}; set CUDA_HOME, or install "
          "the Python package nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12)",
          library.searched);
      return;
    }
    api = Functions(library);
    open_builtins(library.path.parent_path());
    std::error_code none;
    identity =
        fmt::format("{}, {} bytes", version_text(api.version()), fs::file_size(library.path, none));
    int count = 0;
    api.nvrtcGetNumSupportedArchs(&count);
    capabilities.resize(static_cast<size_t>(count));
    api.nvrtcGetSupportedArchs(capabilities.data());
  }
};

const Nvrtc& loaded() {
  static const Nvrtc kNvrtc;
  return kNvrtc;
}

const Nvrtc& nvrtc() {
  if (!loaded().unavailable.empty()) throw Error(Status::kUnavailable, loaded().unavailable);
  return loaded();
}

struct Program {
  nvrtcProgram handle = nullptr;
  ~Program() {
    if (handle != nullptr) loaded().api.nvrtcDestroyProgram(&handle);
  }
};

/// Pointers to the characters of strings, for C.
std::vector<const char*> pointers(std::span<const std::string> strings) {
  std::vector<const char*> result;
  for (const std::string& s : strings) result.push_back(s.c_str());
  return result;
}

template <class Size, class Get>
std::string text(nvrtcProgram program, Size size_of, Get get) {
  size_t size = 0;
  if (size_of(program, &size) != 0 || size == 0) return {};
  std::string result(size, '\0');
  get(program, result.data());
  return result;
}

}  // namespace

SharedLibrary open_nvrtc(std::span<const fs::path> places, int driver_version) {
  constexpr std::array<const char*, 3> kNames = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
  return open_library(kNames, places, [&](const SharedLibrary& library) {
    return refused(library, driver_version);
  });
}

const std::string& nvrtc_unavailable() { return loaded().unavailable; }

const std::vector<int>& nvrtc_capabilities() { return nvrtc().capabilities; }

const std::string& nvrtc_identity() { return nvrtc().identity; }

Cubin nvrtc_compile(const KernelSources& sources, const std::string& kernel,
                    const std::string& kernel_config, std::span<const std::string> options) {
  const Functions& api = nvrtc().api;
  std::vector<const char*> names{"kernel_config.h"}, texts{kernel_config.c_str()};
  for (const auto& [name, source] : sources) {
    names.push_back(name.c_str());
    texts.push_back(source.c_str());
  }
  Program program;
  nvrtcResult result =
      api.nvrtcCreateProgram(&program.handle, sources.at(kernel).c_str(), kernel.c_str(),
                             static_cast<int>(names.size()), texts.data(), names.data());
  const std::vector<const char*> flags = pointers(options);
  if (result == 0) {
    result = api.nvrtcCompileProgram(program.handle, static_cast<int>(flags.size()), flags.data());
  }
  Cubin cubin;
  if (program.handle != nullptr) {
    cubin.log = text(program.handle, api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog);
    cubin.log.erase(cubin.log.find_last_not_of(std::string_view(" \n\0", 3)) + 1);
  }
  if (result == 0) {
    cubin.image = text(program.handle, api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN);
    if (cubin.image.empty()) {
      cubin.image = text(program.handle, api.nvrtcGetPTXSize, api.nvrtcGetPTX);
    }
  }
  if (cubin.image.empty()) {
    throw Error(Status::kInternal,
                fmt::format("NVRTC {} ({}) cannot compile {}: error {}\n{}", nvrtc().identity,
                            nvrtc().library.path.string(), kernel, result, cubin.log));
  }
  return cubin;
}

}  // namespace fulgur::cuda
