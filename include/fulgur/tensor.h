#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "fulgur/export.h"

namespace fulgur {

enum class DType : uint8_t { kF16, kBF16, kF32, kF64, kI32 };
enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// Bytes of one element.
FULGUR_API int64_t size_of(DType dtype);
/// "f16", "bf16", "f32", "f64" or "i32".
FULGUR_API const char* name_of(DType dtype);
/// "cpu" or "cuda:0".
FULGUR_API std::string name_of(Device device);

/// A view of memory that somebody else owns: the data, dtype, device, shape and strides of a DLPack
/// tensor of at most four dimensions. Strides count elements. A default-constructed Tensor (rank 0)
/// means "not given". Tensors passed as inputs are never written.
struct FULGUR_API Tensor {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  /// A row-major view of `data` with the given shape (1 to 4 dimensions).
  static Tensor contiguous(const void* data, DType dtype, std::span<const int64_t> shape,
                           Device device = {});
  static Tensor contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                           Device device = {}) {
    return contiguous(data, dtype, std::span(shape.begin(), shape.size()), device);
  }

  /// A view of a DLPack tensor (byte_offset applied; strides may be null = row-major).
  /// Throws Error(kInvalidArgument) naming `name` for a dtype, device or rank that fulgur lacks.
  static Tensor from_dlpack(const DLTensor& tensor, const char* name = "tensor");

  bool given() const { return rank > 0; }
  /// Number of elements; 0 when not given.
  int64_t numel() const;
  /// "f32 (2, 128, 8, 64)".
  std::string describe() const;
};

}  // namespace fulgur
