#include "arrays.h"

#include <fmt/format.h>

#include <optional>

namespace fulgur::python {
namespace {

/// Where an array says that it is; none where it does not say, or fails to, as its __dlpack__ will.
std::optional<DLDevice> device_of(nb::handle array) {
  if (!nb::hasattr(array, "__dlpack_device__")) return std::nullopt;
  try {
    const nb::object device = array.attr("__dlpack_device__")();
    return DLDevice{static_cast<DLDeviceType>(nb::cast<int>(device[0])), nb::cast<int>(device[1])};
  } catch (const nb::python_error&) {
    return std::nullopt;
  }
}

/// What __dlpack__ gives for work on `stream`; the array itself on the CPU, which has none, and a
/// view of a buffer.
nb::object exported(nb::handle array, uintptr_t stream) {
  if (!nb::hasattr(array, "__dlpack__") && PyObject_CheckBuffer(array.ptr())) {
    // Buffers of ctypes leave out their strides, which a memoryview has.
    nb::object view = nb::steal(PyMemoryView_FromObject(array.ptr()));
    if (view.is_valid()) return view;
    PyErr_Clear();  // the array will be refused by name
  }
  const auto device = device_of(array);
  if (!device || device->device_type != kDLCUDA) return nb::borrow(array);
  nb::dict arguments;
  arguments["stream"] = stream == 0 ? 1 : stream;  // 1: the default stream
  arguments["max_version"] = nb::make_tuple(1, 0);
  const nb::object export_array = array.attr("__dlpack__");
  try {
    return export_array(**arguments);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  PyDict_DelItemString(arguments.ptr(), "max_version");  // a library older than DLPack 1.0
  return export_array(**arguments);
}

/// Why `array` has no DLPack tensor, in the words of its own __dlpack__.
std::string refusal(nb::handle array) {
  if (!nb::hasattr(array, "__dlpack__")) return "";
  try {
    array.attr("__dlpack__")();
  } catch (const nb::python_error& error) {
    return fmt::format(" ({})", nb::str(error.value()).c_str());
  }
  return "";
}

[[noreturn]] void refuse(const char* name, nb::handle array, const char* want) {
  throw nb::type_error(fmt::format("{}: got {}{}, want {}", name,
                                   nb::type_name(array.type()).c_str(), refusal(array), want)
                           .c_str());
}

template <class Memory>
DLTensor tensor_of(const Memory& memory) {
  const nb::dlpack::dtype dtype = memory.dtype();
  DLTensor tensor{};
  tensor.data = const_cast<void*>(memory.data_handle());
  tensor.device = {static_cast<DLDeviceType>(memory.device_type()), memory.device_id()};
  tensor.ndim = static_cast<int>(memory.ndim());
  tensor.dtype = {dtype.code, dtype.bits, dtype.lanes};
  tensor.shape = const_cast<int64_t*>(memory.shape_ptr());
  tensor.strides = const_cast<int64_t*>(memory.stride_ptr());
  tensor.byte_offset = memory.byte_offset();
  return tensor;
}

Device device_named(const std::string& name) {
  if (name == "cpu") return {};
  int index = 0;
  const auto digits = std::string_view(name).substr(std::min<size_t>(name.size(), 5));
  const bool numbered = name.starts_with("cuda:") && !digits.empty() && digits.size() < 4 &&
                        digits.find_first_not_of("0123456789") == std::string_view::npos;
  if (numbered) index = std::stoi(std::string(digits));
  if (numbered || name == "cuda") return {DeviceType::kCuda, index};
  fail(fmt::format("device: got '{}', want 'cpu', 'cuda' or 'cuda:0'", name));
}

/// A view of what `source` exports, which is `array` or stands for it.
View imported(const char* name, nb::handle array, nb::handle source, bool writable, int code) {
  View result;
  nb::ndarray<> writable_memory;  // tried first, because a capsule can be consumed only once
  const bool taken = writable && nb::try_cast(source, writable_memory, false);
  if (taken) result.memory = nb::ndarray<nb::ro>(writable_memory);
  if (!taken && !nb::try_cast(source, result.memory, false)) {
    refuse(name, array, "a NumPy array or an object with __dlpack__");
  }
  if (writable && !taken) {
    fail(fmt::format("{}: got a read-only array, want a writable one", name));
  }
  DLTensor tensor = tensor_of(result.memory);
  if (code != 0) tensor.dtype.code = static_cast<uint8_t>(code);
  result.tensor = Tensor::from_dlpack(tensor, name);
  return result;
}

}  // namespace

const ExchangeApi* exchange_api(nb::handle type) {
  const nb::object of_type = nb::getattr(type, "__dict__");
  const nb::object capsule = of_type.attr("get")("__dlpack_c_exchange_api__");
  if (capsule.is_none()) return nullptr;
  const void* api = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (api == nullptr) throw nb::python_error();
  const auto* exchange = static_cast<const ExchangeApi*>(api);
  return exchange->major == 1 && exchange->tensor != nullptr ? exchange : nullptr;
}

View view(const char* name, nb::handle array, bool writable, uintptr_t stream) {
  View result;
  if (const ExchangeApi* api = exchange_api(array.type())) {
    DLTensor tensor{};
    if (api->tensor(array.ptr(), &tensor) != 0) throw nb::python_error();
    result.array = nb::borrow(array);
    result.tensor = Tensor::from_dlpack(tensor, name);
    return result;
  }
  return imported(name, array, exported(array, stream), writable, 0);
}

View host_view(const char* name, nb::handle array, bool writable, int code) {
  return imported(name, array, array, writable, code);
}

View planned(const char* name, const std::vector<int64_t>& shape, const std::string& dtype,
             const std::string& device) {
  const size_t max_rank = Tensor::kMaxRank;
  if (shape.empty() || shape.size() > max_rank) {
    fail(fmt::format("{}: got {} dimensions, want 1 to {}", name, shape.size(), max_rank));
  }
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kI32,
                           DType::kI64, DType::kBool, DType::kE4M3, DType::kE5M2, DType::kInt8}) {
    if (dtype != name_of(type)) continue;
    View view;
    view.tensor = Tensor::contiguous(nullptr, type, shape, device_named(device));
    return view;
  }
  fail(fmt::format("dtype: got '{}', want 'f32', 'bf16', 'f16' or 'f64'", dtype));
}

WorkspaceView workspace_view(nb::handle array, Device device, uintptr_t stream) {
  WorkspaceView result;
  const std::string want = fmt::format("a writable contiguous array on {}", name_of(device));
  const nb::object source = exported(array, stream);
  if (!nb::try_cast(source, result.memory, false)) refuse("workspace", array, want.c_str());
  const auto& memory = result.memory;
  const bool cuda = memory.device_type() == kDLCUDA;
  const Device got{cuda ? DeviceType::kCuda : DeviceType::kCpu, cuda ? memory.device_id() : 0};
  int64_t step = 1;
  bool contiguous = got == device && (cuda || memory.device_type() == kDLCPU);
  for (size_t i = memory.ndim(); i-- > 0;) {
    contiguous = contiguous && (memory.shape(i) <= 1 || memory.stride(i) == step);
    step *= static_cast<int64_t>(memory.shape(i));
  }
  if (!contiguous) refuse("workspace", array, want.c_str());
  result.workspace = {memory.data(), static_cast<int64_t>(memory.nbytes())};
  return result;
}

uintptr_t current_stream(nb::handle array) {
  if (const ExchangeApi* api = exchange_api(array.type())) {
    DLTensor tensor{};
    if (api->tensor(array.ptr(), &tensor) != 0) {
      PyErr_Clear();  // view() raises an error that names the array
      return 0;
    }
    const DLDevice device = tensor.device;
    void* stream = nullptr;
    if (device.device_type != kDLCUDA || api->current_stream == nullptr) return 0;
    if (api->current_stream(device.device_type, device.device_id, &stream) != 0) {
      throw nb::python_error();
    }
    return reinterpret_cast<uintptr_t>(stream);
  }
  const auto device = device_of(array);
  if (!device || device->device_type != kDLCUDA) return 0;
  const nb::object library = nb::getattr(array.type(), "__module__");
  if (!std::string_view(nb::str(library).c_str()).starts_with("cupy")) return 0;
  return nb::cast<uintptr_t>(
      nb::module_::import_("cupy").attr("cuda").attr("get_current_stream")().attr("ptr"));
}

}  // namespace fulgur::python
