/// Arrays of any library as fulgur's tensors, through DLPack; never a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fulgur/fulgur.h"

namespace fulgur::python {

namespace nb = nanobind;

[[noreturn]] inline void fail(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

/// A tensor and what keeps its memory alive; no memory for one that is only planned.
struct View {
  Tensor tensor;
  nb::object array;
  nb::ndarray<nb::ro> memory;
};

/// What a type offers as __dlpack_c_exchange_api__ (DLPack 1.3): its tensors and its stream without
/// a call of Python. Header: DLPackExchangeAPI.
struct ExchangeApi {
  uint32_t major, minor;
  const void* older;
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  int (*tensor)(PyObject* array, DLTensor* borrowed);
  int (*current_stream)(int device_type, int32_t device, void** stream);
};

/// The exchange API of a type itself, null where it has none: a subclass may have changed what its
/// arrays are.
const ExchangeApi* exchange_api(nb::handle type);

/// A view of the memory of `array`, which on a GPU is ready for work that is put on `stream`.
View view(const char* name, nb::handle array, bool writable, uintptr_t stream);
/// A view of the memory of an array of NumPy, which is the host's. An array of ml_dtypes, which
/// NumPy cannot export, comes as integers of its size, with DLPack's `code` of its dtype; else 0.
View host_view(const char* name, nb::handle array, bool writable, int code);

/// A contiguous tensor without memory, to plan with.
View planned(const char* name, const std::vector<int64_t>& shape, const std::string& dtype,
             const std::string& device);

/// A workspace: a writable contiguous array of any dtype on `device`, and what keeps it alive.
struct WorkspaceView {
  Workspace workspace;
  nb::ndarray<> memory;
};
WorkspaceView workspace_view(nb::handle array, Device device, uintptr_t stream);

/// The stream that the array's library works on now, where the array is on a GPU and its library
/// has such a thing; else 0, the default stream.
uintptr_t current_stream(nb::handle array);

}  // namespace fulgur::python
