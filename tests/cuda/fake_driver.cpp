// A libcuda.so.1 for tests on machines without a GPU: one device of compute capability
// FAKE_CUDA_CAPABILITY (default 90), whose memory is the host's and whose kernels do nothing, in a
// millisecond. It records what it is asked. FAKE_CUDA_DEVICES is the number of devices,
// FAKE_CUDA_INIT the result of cuInit.
#include "fake_driver.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "kernels/append_params.h"
#include "kernels/forward_copy_params.h"
#include "kernels/forward_padding_params.h"
#include "kernels/merge_params.h"
#include "kernels/sm90/backward_params.h"
#include "kernels/sm90/decode_params.h"
#include "kernels/sm90/forward_params.h"

namespace {

using fulgur::test::FakeMap;
using fulgur::test::FakeState;
using fulgur::test::FakeUserObject;

/// The kernels there are, and the bytes of their arguments.
struct Kernel {
  const char* name;
  size_t params;
};
constexpr Kernel kKernels[] = {{"fulgur_append", sizeof(AppendParams)},
                               {"fulgur_merge", sizeof(MergeParams)},
                               {"fulgur_forward", sizeof(ForwardParams)},
                               {"fulgur_decode", sizeof(DecodeParams)},
                               {"fulgur_forward_copy", sizeof(ForwardCopyParams)},
                               {"fulgur_forward_padding", sizeof(ForwardPaddingParams)},
                               {"fulgur_backward_prepare", sizeof(BackwardParams)},
                               {"fulgur_backward_keys", sizeof(BackwardParams)},
                               {"fulgur_backward_rows", sizeof(BackwardParams)},
                               {"fulgur_backward_round", sizeof(BackwardParams)},
                               {"fulgur_backward_repair", sizeof(BackwardParams)}};

FakeState state;
std::mutex launching;
thread_local void* current = nullptr;
thread_local int capture_mode = 0;  // global

/// A call that a capture does not bear, unless its thread says that it has nothing to do with it.
void unsafe() { state.unsafe_in_capture += state.capturing != nullptr && capture_mode != 2; }

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

extern "C" {

FakeState* fulgur_fake_state() { return &state; }

int cuInit(unsigned) { return number("FAKE_CUDA_INIT", 0); }
// NVRTC asks for it, and goes without.
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
  std::snprintf(name, static_cast<size_t>(size), "Fake GPU");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = number("FAKE_CUDA_CAPABILITY", 90);
  *value = attribute == 16   ? 132
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
int cuModuleLoadData(void** module, const void*) {
  unsafe();
  ++state.loaded;
  *module = &state;
  return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(name, kernel.name) != 0) continue;
    *function = const_cast<Kernel*>(&kernel);
    return 0;
  }
  return 500;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  unsafe();
  ++state.allocated;
  *pointer = reinterpret_cast<uintptr_t>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return *pointer == 0 ? 2 : 0;
}
int cuMemFree_v2(unsigned long long pointer) {
  ++state.freed;
  std::free(reinterpret_cast<void*>(pointer));
  return 0;
}
int cuMemcpy(unsigned long long to, unsigned long long from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return 0;
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
int cuStreamSynchronize(void*) { return 0; }
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long*, void** graph,
                              const void**, size_t*) {
  *status = stream != nullptr && stream == state.capturing ? 1 : 0;
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
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** arguments, void**) {
  if (current == nullptr) return 201;
  if (grid_x == 0 || grid_y == 0 || grid_y > 65535 || grid_z != 1 || block_y != 1 || block_z != 1)
    return 1;
  const auto* bytes = static_cast<const unsigned char*>(arguments[0]);
  const auto [name, size] = *static_cast<const Kernel*>(function);
  unsigned keys = 0;  // of a key tile of the forward kernel
  if (size == sizeof(ForwardParams)) {
    ForwardParams params;
    std::memcpy(&params, bytes, size);
    keys = FakeMap::of(&params.k_map).box[1];
  }
  state.clock_ms += block_x == state.fast_block && keys == state.fast_keys ? 0.5 : 1;
  if (!state.record) return 0;
  const std::scoped_lock lock(launching);
  state.launches.push_back(
      {name, grid_x, grid_y, block_x, shared_bytes, stream, {bytes, bytes + size}});
  return 0;
}

}  // extern "C"
