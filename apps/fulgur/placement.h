#pragma once

#include <utility>
#include <vector>

#include "fulgur/tensor.h"
#include "io/array.h"

namespace fulgur::app {

/// Host arrays as tensors of the device that computes: views of them on the CPU, copies in the
/// memory of a CUDA device. Owns the copies. Throws Error as fulgur::cuda::allocate and copy do.
class Placement {
 public:
  explicit Placement(Device device) : device_(device) {}
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  Device device() const { return device_; }
  /// `array` must outlive the tensor.
  Tensor input(const io::Array& array);
  /// `array` must outlive collect().
  Tensor output(io::Array& array);
  /// The same, and it begins with what the array holds.
  Tensor initialized_output(io::Array& array);
  /// Brings the outputs back into their arrays; call it once they are computed.
  void collect();

 private:
  Tensor allocated(const io::Array& array);

  Device device_;
  std::vector<void*> memory_;
  std::vector<std::pair<io::Array*, void*>> outputs_;
};

}  // namespace fulgur::app
