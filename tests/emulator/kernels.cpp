// The part of the driver that loads and launches kernels, in the emulator.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <string>

#include "fake_driver.h"
#include "machine.h"

extern "C" {

int cuModuleLoadData(void** module, const void* image) {
  size_t size;
  std::memcpy(&size, image, sizeof(size));
  const int file = memfd_create("kernel", 0);
  if (file < 0 || write(file, static_cast<const char*>(image) + sizeof(size), size) !=
                      static_cast<ssize_t>(size))
    return 2;
  *module = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (*module == nullptr) emulator::fail(dlerror());
  return 0;  // the file stays open: the loader knows libraries by their path
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = dlsym(module, name);
  return *function == nullptr ? 500 : 0;
}

int cuLaunchKernelEx(const fulgur::cuda::CUlaunchConfig* launch, void* function, void** arguments,
                     void**) {
  static std::mutex launching;
  const std::scoped_lock lock(launching);
  if (launch->gridDimZ != 1 || launch->blockDimY != 1 || launch->blockDimZ != 1) return 1;
  emulator::run({{launch->gridDimX, launch->gridDimY, 1},
                 {launch->blockDimX, 1, 1},
                 launch->sharedMemBytes,
                 [&] { reinterpret_cast<void (*)(const void*)>(function)(arguments[0]); },
                 fulgur::test::starts_early(*launch)});
  return 0;
}

}  // extern "C"
