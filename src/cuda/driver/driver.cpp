#include "cuda/driver/driver.h"

#include <fmt/format.h>
#include <pthread.h>

#include <array>
#include <atomic>

#include "base/fork_mutex.h"
#include "cuda/driver/shared_library.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

/// Whether this process is a child of fork() in which CUDA does not work, as the parent had started
/// it.
std::atomic<bool> forked = false;

struct Loaded {
  Driver driver;
  std::string unavailable;
  std::string in_child =
      "this process was forked from one that had used CUDA, which does not work in a child; want a "
      "new process (in Python, the start method \"spawn\")";

  Loaded() {
    // The loader's path, then folders in which containers mount the driver, unknown to the loader.
    const std::array<std::filesystem::path, 4> places = {
        "", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib"};
    const std::array<const char*, 1> names = {"libcuda.so.1"};
    const SharedLibrary library = open_library(names, places);
    if (!library) {
      unavailable = fmt::format("no NVIDIA driver: looked for {}", library.searched);
      return;
    }
#define FULGUR_LOAD(name, symbol_name, arguments)                                                 \
  driver.name = reinterpret_cast<decltype(driver.name)>(library.symbol(symbol_name));             \
  if (driver.name == nullptr && unavailable.empty()) {                                            \
    unavailable =                                                                                 \
        fmt::format("driver {} lacks {}; want CUDA 12.0 or newer", library.path.string(), #name); \
  }
    FULGUR_DRIVER_FUNCTIONS(FULGUR_LOAD)
#undef FULGUR_LOAD
    if (!unavailable.empty()) return;
    if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS) {
      const char* text = nullptr;
      driver.cuGetErrorString(result, &text);
      unavailable = fmt::format("driver {} does not start: {} (error {})", library.path.string(),
                                text == nullptr ? "unknown error" : text, result);
      return;
    }
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    driver.cuDriverGetVersion(&driver.version);
    if (driver.version < kMinVersion) {
      unavailable = fmt::format("driver {} supports CUDA {}; want 12.0 or newer",
                                library.path.string(), version_text(driver.version));
    }
  }
};

const Loaded& loaded() {
  static constinit MadeOnce<const Loaded> made;
  return made.get([] { return Loaded(); });
}

}  // namespace

const std::string& driver_unavailable() {
  return forked ? loaded().in_child : loaded().unavailable;
}

const Driver& driver() {
  if (const std::string& why = driver_unavailable(); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }
  return loaded().driver;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char *name = nullptr, *text = nullptr;
  loaded().driver.cuGetErrorName(result, &name);
  loaded().driver.cuGetErrorString(result, &text);
  throw Error(result == CUDA_ERROR_OUT_OF_MEMORY ? Status::kOutOfMemory : Status::kInternal,
              fmt::format("{}: {} ({})", what, text == nullptr ? "unknown error" : text,
                          name == nullptr ? fmt::format("error {}", result) : name));
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace fulgur::cuda
