// The part of the driver that loads and launches kernels, in the emulator.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <string>

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

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void*, void** arguments, void**) {
  static std::mutex launching;
  const std::scoped_lock lock(launching);
  if (grid_z != 1 || block_y != 1 || block_z != 1) return 1;
  emulator::run({{grid_x, grid_y, 1}, {block_x, 1, 1}, shared_bytes, [&] {
                   reinterpret_cast<void (*)(const void*)>(function)(arguments[0]);
                 }});
  return 0;
}

}  // extern "C"
