#include <fmt/format.h>

#include "base/check.h"
#include "cuda/device/gpu.h"
#include "fulgur/cuda.h"

namespace fulgur::cuda {
namespace {

size_t checked_size(int64_t bytes) {
  if (bytes < 0) fail("bytes", "got {}, want >= 0", bytes);
  return static_cast<size_t>(bytes);
}

CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

void* allocate(int64_t bytes, int device) {
  const size_t size = checked_size(bytes);
  const CurrentContext current(Gpu::at(device).context());
  if (size == 0) return nullptr;
  CUdeviceptr data = 0;
  check(driver().cuMemAlloc(&data, size),
        fmt::format("{} bytes on cuda:{}", bytes, device).c_str());
  return reinterpret_cast<void*>(data);
}

void deallocate(void* data, int device) {
  if (data == nullptr) return;
  const CurrentContext current(Gpu::at(device).context());
  check(driver().cuMemFree(address(data)), "cuMemFree");
}

void copy(void* to, const void* from, int64_t bytes, int device) {
  const size_t size = checked_size(bytes);
  if (size == 0) return;
  if (to == nullptr) fail("to", "got null, want {} bytes", bytes);
  if (from == nullptr) fail("from", "got null, want {} bytes", bytes);
  const CurrentContext current(Gpu::at(device).context());
  check(driver().cuMemcpy(address(to), address(from), size), "cuMemcpy");
  // cuMemcpyHtoD returns when host memory may be reused, before the copy is complete.
  check(driver().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

void synchronize(int device) {
  const CurrentContext current(Gpu::at(device).context());
  check(driver().cuCtxSynchronize(), "synchronize");
}

}  // namespace fulgur::cuda
