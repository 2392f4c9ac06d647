#pragma once

#include <cstddef>
#include <string>

// Declarations of the CUDA driver API that the engine uses, so that neither CUDA headers are needed
// to build it nor a driver to start it. Names and values are those of the driver API's reference.
namespace fulgur::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct ContextHandle*;
using CUmodule = struct ModuleHandle*;
using CUfunction = struct FunctionHandle*;
using CUstream = struct StreamHandle*;
using CUevent = struct EventHandle*;
using CUgraph = struct GraphHandle*;
using CUgraphNode = struct GraphNodeHandle*;
using CUuserObject = struct UserObjectHandle*;

inline constexpr CUresult CUDA_SUCCESS = 0, CUDA_ERROR_OUT_OF_MEMORY = 2,
                          CUDA_ERROR_NOT_READY = 600;

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,  // kHz
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,        // kHz
  CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,  // bits
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};
enum CUfunction_attribute : int { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum CUstream_flags : unsigned { CU_STREAM_NON_BLOCKING = 1 };
enum CUevent_flags : unsigned { CU_EVENT_DISABLE_TIMING = 2 };
enum CUmemhostregister_flags : unsigned {
  CU_MEMHOSTREGISTER_PORTABLE = 1,
  CU_MEMHOSTREGISTER_DEVICEMAP = 2,
};
enum CUstreamWaitValue_flags : unsigned { CU_STREAM_WAIT_VALUE_GEQ = 0 };
enum CUipcMem_flags : unsigned { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };
enum CUmemorytype : int { CU_MEMORYTYPE_DEVICE = 2 };
struct CUipcMemHandle {
  char reserved[64];
};
struct CUDA_MEMCPY2D {
  size_t srcXInBytes = 0, srcY = 0;
  CUmemorytype srcMemoryType = CU_MEMORYTYPE_DEVICE;
  const void* srcHost = nullptr;
  CUdeviceptr srcDevice = 0;
  void* srcArray = nullptr;
  size_t srcPitch = 0, dstXInBytes = 0, dstY = 0;
  CUmemorytype dstMemoryType = CU_MEMORYTYPE_DEVICE;
  void* dstHost = nullptr;
  CUdeviceptr dstDevice = 0;
  void* dstArray = nullptr;
  size_t dstPitch = 0, WidthInBytes = 0, Height = 0;
};
enum CUstreamCaptureStatus : int {
  CU_STREAM_CAPTURE_STATUS_NONE = 0,
  CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
};
enum CUstreamCaptureMode : int { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum CUuserObject_flags : unsigned { CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1 };
enum CUuserObjectRetain_flags : unsigned { CU_GRAPH_USER_OBJECT_MOVE = 1 };
enum CUlaunchAttributeID : int { CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  alignas(8) union {
    char pad[64];
    int programmaticStreamSerializationAllowed;
  } value;
};
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  const CUlaunchAttribute* attrs;
  unsigned numAttrs;
};
enum CUtensorMapDataType : int {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_INT64 = 5,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};
enum CUtensorMapInterleave : int { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle : int {
  CU_TENSOR_MAP_SWIZZLE_NONE = 0,
  CU_TENSOR_MAP_SWIZZLE_32B = 1,
  CU_TENSOR_MAP_SWIZZLE_64B = 2,
  CU_TENSOR_MAP_SWIZZLE_128B = 3,
};
enum CUtensorMapL2promotion : int {
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
};
enum CUtensorMapFloatOOBfill : int { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

// F(name, symbol, arguments) for every function.
#define FULGUR_DRIVER_FUNCTIONS(F)                                                                \
  F(cuInit, "cuInit", (unsigned flags))                                                           \
  F(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                                     \
  F(cuGetErrorName, "cuGetErrorName", (CUresult error, const char** name))                        \
  F(cuGetErrorString, "cuGetErrorString", (CUresult error, const char** text))                    \
  F(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                           \
  F(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int index))                                   \
  F(cuDeviceGetName, "cuDeviceGetName", (char* name, int size, CUdevice device))                  \
  F(cuDeviceGetAttribute, "cuDeviceGetAttribute",                                                 \
    (int* value, CUdevice_attribute attribute, CUdevice device))                                  \
  F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice))        \
  F(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                    \
  F(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                 \
  F(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                 \
  F(cuCtxSynchronize, "cuCtxSynchronize", ())                                                     \
  F(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void* image))                 \
  F(cuModuleGetFunction, "cuModuleGetFunction",                                                   \
    (CUfunction * function, CUmodule module, const char* name))                                   \
  F(cuFuncSetAttribute, "cuFuncSetAttribute",                                                     \
    (CUfunction function, CUfunction_attribute attribute, int value))                             \
  F(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * pointer, size_t bytes))                           \
  F(cuMemFree, "cuMemFree_v2", (CUdeviceptr pointer))                                             \
  F(cuMemHostRegister, "cuMemHostRegister_v2", (void* data, size_t bytes, unsigned flags))        \
  F(cuMemHostUnregister, "cuMemHostUnregister", (void* data))                                     \
  F(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                                    \
    (CUdeviceptr * pointer, void* data, unsigned flags))                                          \
  F(cuMemcpy, "cuMemcpy", (CUdeviceptr to, CUdeviceptr from, size_t bytes))                       \
  F(cuMemcpyAsync, "cuMemcpyAsync",                                                               \
    (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                            \
  F(cuMemcpy2DAsync, "cuMemcpy2DAsync_v2", (const CUDA_MEMCPY2D* copy, CUstream stream))          \
  F(cuIpcGetMemHandle, "cuIpcGetMemHandle", (CUipcMemHandle * handle, CUdeviceptr data))          \
  F(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2",                                                  \
    (CUdeviceptr * data, CUipcMemHandle handle, unsigned flags))                                  \
  F(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CUdeviceptr data))                               \
  F(cuMemsetD8Async, "cuMemsetD8Async",                                                           \
    (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                         \
  F(cuStreamCreate, "cuStreamCreate", (CUstream * stream, CUstream_flags flags))                  \
  F(cuStreamCreateWithPriority, "cuStreamCreateWithPriority",                                     \
    (CUstream * stream, CUstream_flags flags, int priority))                                      \
  F(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                     \
  F(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                \
  F(cuStreamQuery, "cuStreamQuery", (CUstream stream))                                            \
  F(cuStreamWriteValue32, "cuStreamWriteValue32_v2",                                              \
    (CUstream stream, CUdeviceptr to, uint32_t value, unsigned flags))                            \
  F(cuStreamWaitValue32, "cuStreamWaitValue32_v2",                                                \
    (CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags))                            \
  F(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned flags))     \
  F(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2",                                          \
    (CUstream stream, CUstreamCaptureStatus * status, unsigned long long* id, CUgraph* graph,     \
     const CUgraphNode** dependencies, size_t* count))                                            \
  F(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode",                       \
    (CUstreamCaptureMode * mode))                                                                 \
  F(cuUserObjectCreate, "cuUserObjectCreate",                                                     \
    (CUuserObject * object, void* data, void (*destroy)(void*), unsigned references,              \
     CUuserObject_flags flags))                                                                   \
  F(cuGraphRetainUserObject, "cuGraphRetainUserObject",                                           \
    (CUgraph graph, CUuserObject object, unsigned count, CUuserObjectRetain_flags flags))         \
  F(cuStreamGetId, "cuStreamGetId", (CUstream stream, unsigned long long* id))                    \
  F(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                            \
  F(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                         \
  F(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                             \
  F(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                    \
  F(cuEventElapsedTime, "cuEventElapsedTime", (float* milliseconds, CUevent from, CUevent to))    \
  F(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                             \
    (void* map, CUtensorMapDataType type, unsigned rank, void* address,                           \
     const unsigned long long* dims, const unsigned long long* byte_strides, const unsigned* box, \
     const unsigned* element_strides, CUtensorMapInterleave interleave,                           \
     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill))      \
  F(cuTensorMapReplaceAddress, "cuTensorMapReplaceAddress", (void* map, void* address))           \
  F(cuLaunchKernelEx, "cuLaunchKernelEx",                                                         \
    (const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra))

/// The handle of the calling thread's default stream.
inline const CUstream CU_STREAM_PER_THREAD = reinterpret_cast<CUstream>(2);

/// 12.0, the first CUDA with tensor maps and cuStreamGetId.
inline constexpr int kMinVersion = 12000;

/// 12.3, the first CUDA whose graphs support programmatic dependent launch.
inline constexpr int kVersionOfEarlyStarts = 12030;

/// The driver's functions.
struct Driver {
#define FULGUR_MEMBER(name, symbol, arguments) CUresult(*name) arguments = nullptr;
  FULGUR_DRIVER_FUNCTIONS(FULGUR_MEMBER)
#undef FULGUR_MEMBER
  int version = 0;  ///< of the newest CUDA that it supports: 12040 is 12.4
};

/// Why there is no usable driver; empty if there is one. Loads it once.
const std::string& driver_unavailable();

/// The initialized driver. Throws Error(kUnavailable) if there is none.
const Driver& driver();

/// Throws Error for a failed call of the driver: kOutOfMemory, or kInternal, whose message names
/// `what`.
void check(CUresult result, const char* what);

/// The text of a version: "12.4" for 12040.
std::string version_text(int version);

}  // namespace fulgur::cuda
