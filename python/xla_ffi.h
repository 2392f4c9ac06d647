/// XLA's foreign function interface, as far as fulgur.jax uses it: the layout of the C structs that
/// XLA hands to a handler and takes from it. These are facts of its ABI, the same in all jaxlibs
/// from 0.7 to 0.12; tests/python/with_jax/test_jax_handlers.py compares them with the header that
/// jaxlib brings (xla/ffi/api/c_api.h), so that neither JAX nor its headers are needed to build.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fulgur::python::xla {

/// Every struct begins with its size, and all but the smallest go on with a list of extensions.
struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};
/// Of the structs below. XLA takes handlers of older minor versions than its own.
constexpr int kMajorVersion = 0, kMinorVersion = 1;

/// What a handler returns when XLA queries its metadata. Later versions add fields after these.
struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};
/// Calls launch the same work on the device each time, and may be captured and replayed.
constexpr uint32_t kCommandBufferCompatible = 1;

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum class DataType : int32_t {
  kPred = 1,
  kS8 = 2,
  kS32 = 4,
  kU32 = 8,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
  kF8E5M2 = 19,
  kF8E4M3FN = 20
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

/// The operands of a call, or its results: buffers, as kBuffer says of each.
struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;
  void** items;
};
constexpr int32_t kBuffer = 1;

struct Span {
  const char* data;
  size_t size;
};

/// Numbers by name.
struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int32_t* types;
  Span** names;
  void** items;
};
/// An attribute is an Array of numbers.
constexpr int32_t kArray = 1;

struct Array {
  int32_t dtype;
  size_t size;
  void* data;
};

struct Api;
struct Context;
struct Error;

enum class Stage : int32_t { kInitialize = 2, kExecute = 3 };

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers operands, results;
  Attributes attributes;
};

/// A handler; null is success.
using Handler = Error*(CallFrame*);

enum class ErrorCode : int32_t {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14
};

struct MakeError {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct DestroyError {
  size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct GetStream {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  ///< the answer
};

struct GetThreads {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int64_t* threads;  ///< where the answer goes
};

struct GetDevice {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int32_t device;  ///< the answer
};

/// XLA's functions; those that are not used stand here by their place alone.
struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  const void* internal;
  Error* (*make_error)(MakeError*);
  void* get_message;
  void (*destroy_error)(DestroyError*);
  void* register_handler;
  Error* (*get_stream)(GetStream*);
  void* types_states_memory_schedule[7];
  Error* (*get_threads)(GetThreads*);
  void* futures_run[4];
  Error* (*get_device)(GetDevice*);
};

}  // namespace fulgur::python::xla
