// A libcuda.so.1 for tests on machines without a GPU: one device of compute capability
// FAKE_CUDA_CAPABILITY (default 90), FAKE_CUDA_MULTIPROCESSORS (132) and FAKE_CUDA_NAME, with the
// clocks and the L2 cache of an H200, whose memory is the host's. It records what it is asked.
// FAKE_CUDA_DEVICES is the number of devices, FAKE_CUDA_INIT the result of cuInit. What kernels do
// is said by fake_kernels.cpp, nothing, or by the emulator.
#include "fake_driver.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/driver/driver.h"

namespace {

using fulgur::test::FakeMap;
using fulgur::test::FakeState;
using fulgur::test::FakeUserObject;

FakeState state;
thread_local void* current = nullptr;
thread_local int capture_mode = 0;  // global
std::mutex allocating;
std::map<uintptr_t, size_t> allocations;  // bytes by address

/// Memory that another process may open, and what is opened here: addresses that only copies take.
struct Exported {
  pid_t process = 0;
  unsigned long long data = 0;
};
struct Opened {
  unsigned long long at = 0;
  Exported from;
};
constexpr size_t kOpenedBytes = size_t{1} << 32;
std::vector<Opened> opened;

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

namespace fulgur::test {

bool is_allocated(const void* at) {
  const auto place = reinterpret_cast<uintptr_t>(at);
  const std::scoped_lock lock(allocating);
  const auto after = allocations.upper_bound(place);
  return after != allocations.begin() && place - std::prev(after)->first < std::prev(after)->second;
}

int fake_capability() { return number("FAKE_CUDA_CAPABILITY", 90); }

void unsafe_in_capture() {
  state.unsafe_in_capture += state.capturing != nullptr && capture_mode != 2;
}

}  // namespace fulgur::test

extern "C" {

FakeState* fulgur_fake_state() { return &state; }

int cuInit(unsigned) { return number("FAKE_CUDA_INIT", 0); }
// NVRTC calls it, and does without a result.
int cuGetExportTable(const void**, const void*) { return 500; }
int cuDriverGetVersion(int* version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return 0;
}
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "a fake failure";
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = number("FAKE_CUDA_DEVICES", 1);
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetName(char* name, int size, int) {
  const char* const given = std::getenv("FAKE_CUDA_NAME");
  std::snprintf(name, static_cast<size_t>(size), "%s", given == nullptr ? "Fake GPU" : given);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = fulgur::test::fake_capability();
  *value = attribute == 13   ? 1755000
           : attribute == 16 ? number("FAKE_CUDA_MULTIPROCESSORS", 132)
           : attribute == 36 ? number("FAKE_CUDA_MEMORY_KHZ", 3125000)
           : attribute == 37 ? 6144
           : attribute == 38 ? 50 << 20
           : attribute == 75 ? capability / 10
           : attribute == 76 ? capability % 10
           : attribute == 97 ? 232448
                             : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  ++state.contexts;
  *context = &state;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  current = context;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = nullptr;
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  fulgur::test::unsafe_in_capture();
  ++state.allocated;
  *pointer = reinterpret_cast<uintptr_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  const std::scoped_lock lock(allocating);
  allocations[*pointer] = bytes;
  return *pointer == 0 ? 2 : 0;
}
int cuMemFree_v2(unsigned long long pointer) {
  ++state.freed;
  {
    const std::scoped_lock lock(allocating);
    allocations.erase(pointer);
  }
  std::free(reinterpret_cast<void*>(pointer));
  return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemHostGetDevicePointer_v2(unsigned long long* pointer, void* data, unsigned) {
  *pointer = reinterpret_cast<uintptr_t>(data);
  return 0;
}
int cuMemcpy(unsigned long long to, unsigned long long from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  for (const Opened& other : opened) {
    if (from < other.at || from >= other.at + kOpenedBytes) continue;
    const iovec here{reinterpret_cast<void*>(to), bytes};
    const iovec there{reinterpret_cast<void*>(other.from.data + (from - other.at)), bytes};
    const ssize_t read = process_vm_readv(other.from.process, &here, 1, &there, 1, 0);
    return read == static_cast<ssize_t>(bytes) ? 0 : 700;
  }
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuMemcpy2DAsync_v2(const fulgur::cuda::CUDA_MEMCPY2D* copy, void*) {
  if (copy->srcPitch < copy->WidthInBytes || copy->dstPitch < copy->WidthInBytes) return 1;
  for (size_t row = 0; row < copy->Height; ++row) {
    std::memcpy(reinterpret_cast<void*>(copy->dstDevice + row * copy->dstPitch),
                reinterpret_cast<void*>(copy->srcDevice + row * copy->srcPitch),
                copy->WidthInBytes);
  }
  return 0;
}
int cuIpcGetMemHandle(fulgur::cuda::CUipcMemHandle* handle, unsigned long long data) {
  const Exported exported{getpid(), data};
  *handle = {};
  std::memcpy(handle->reserved, &exported, sizeof(exported));
  return prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY) == 0 || getuid() == 0 ? 0 : 1;
}
int cuIpcOpenMemHandle_v2(unsigned long long* data, fulgur::cuda::CUipcMemHandle handle, unsigned) {
  Opened other;
  std::memcpy(&other.from, handle.reserved, sizeof(other.from));
  void* const at =
      mmap(nullptr, kOpenedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (other.from.process == getpid() || at == MAP_FAILED) return 201;
  other.at = *data = reinterpret_cast<uintptr_t>(at);
  opened.push_back(other);
  return 0;
}
int cuIpcCloseMemHandle(unsigned long long data) {
  std::erase_if(opened, [&](const Opened& other) { return other.at == data; });
  return munmap(reinterpret_cast<void*>(data), kOpenedBytes) == 0 ? 0 : 1;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}
int cuStreamGetId(void* stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return 0;
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = new char;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new char;
  return 0;
}
int cuStreamSynchronize(void*) { return 0; }
int cuStreamQuery(void*) { return 0; }
int cuStreamWriteValue32_v2(void*, unsigned long long to, uint32_t value, unsigned) {
  std::atomic_ref(*reinterpret_cast<uint32_t*>(to)).store(value);
  return 0;
}
int cuStreamWaitValue32_v2(void*, unsigned long long at, uint32_t value, unsigned) {
  const std::atomic_ref counter(*reinterpret_cast<uint32_t*>(at));
  while (static_cast<int32_t>(counter.load() - value) < 0) sched_yield();
  return 0;
}
int cuStreamWaitEvent(void*, double*, unsigned) { return 0; }
int cuStreamDestroy_v2(void* stream) {
  delete static_cast<char*>(stream);
  return 0;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph,
                              const void**, size_t*) {
  *status = stream != nullptr && stream == state.capturing ? 1 : 0;
  *id = state.capture;
  *graph = &state;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
int cuUserObjectCreate(FakeUserObject** object, void* data, void (*destroy)(void*), unsigned,
                       unsigned) {
  *object = new FakeUserObject{data, destroy};
  return 0;
}
int cuGraphRetainUserObject(void*, FakeUserObject* object, unsigned, unsigned) {
  state.held.push_back(*object);
  delete object;
  return 0;
}
int cuEventCreate(double** event, unsigned) {
  *event = new double(0);
  return current == nullptr ? 201 : 0;
}
int cuEventDestroy_v2(double* event) {
  delete event;
  return 0;
}
int cuEventRecord(double* event, void*) {
  *event = state.clock_ms;
  return 0;
}
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* milliseconds, const double* from, const double* to) {
  *milliseconds = static_cast<float>(*to - *from);
  return 0;
}
int cuTensorMapEncodeTiled(void* blob, int type, unsigned rank, void* address,
                           const unsigned long long* dims, const unsigned long long* byte_strides,
                           const unsigned* box, const unsigned*, int, int swizzle, int, int) {
  ++state.encoded;
  if (current == nullptr) return 201;  // as the driver does without a context
  if (rank != 4 || reinterpret_cast<uintptr_t>(address) % 16 != 0) return 1;
  FakeMap map{address, {}, {}, {}, type, swizzle};
  for (int i = 0; i < 4; ++i) {
    // What the driver refuses (CUDA driver API, cuTensorMapEncodeTiled).
    if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256) return 1;
    if (i < 3 && (byte_strides[i] % 16 != 0 || byte_strides[i] >= 1ull << 40)) return 1;
    map.dims[i] = dims[i];
    map.box[i] = box[i];
    if (i < 3) map.byte_strides[i] = byte_strides[i];
  }
  std::memcpy(blob, &map, sizeof(map));
  return 0;
}
int cuTensorMapReplaceAddress(void* blob, void* address) {
  FakeMap map = FakeMap::of(blob);
  if (map.dims[0] == 0 || reinterpret_cast<uintptr_t>(address) % 16 != 0) return 1;
  map.address = address;
  std::memcpy(blob, &map, sizeof(map));
  return 0;
}
}  // extern "C"
