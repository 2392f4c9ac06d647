#include "placement.h"

#include "fulgur/cuda.h"

namespace fulgur::app {

Placement::~Placement() {
  for (void* memory : memory_) {
    try {
      cuda::deallocate(memory, device_.index);
    } catch (const Error&) {
      // The failure that leads here has been reported; the process is about to end.
    }
  }
}

Tensor Placement::allocated(const io::Array& array) {
  void* memory = cuda::allocate(array.size_bytes(), device_.index);
  memory_.push_back(memory);
  return Tensor::contiguous(memory, array.dtype(), array.shape(), device_);
}

Tensor Placement::input(const io::Array& array) {
  if (device_.type == DeviceType::kCpu) return array.tensor();
  const Tensor tensor = allocated(array);
  cuda::copy(tensor.data, array.bytes().data(), array.size_bytes(), device_.index);
  return tensor;
}

Tensor Placement::output(io::Array& array) {
  if (device_.type == DeviceType::kCpu) return array.tensor();
  const Tensor tensor = allocated(array);
  outputs_.emplace_back(&array, tensor.data);
  return tensor;
}

Tensor Placement::initialized_output(io::Array& array) {
  const Tensor tensor = output(array);
  if (device_.type != DeviceType::kCpu) {
    cuda::copy(tensor.data, array.bytes().data(), array.size_bytes(), device_.index);
  }
  return tensor;
}

void Placement::collect() {
  for (const auto& [array, memory] : outputs_) {
    cuda::copy(array->data(), memory, array->size_bytes(), device_.index);
  }
}

}  // namespace fulgur::app
