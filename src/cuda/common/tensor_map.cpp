#include "cuda/common/tensor_map.h"

#include <array>

#include "cuda/driver/driver.h"

namespace fulgur::cuda {
namespace {

constexpr unsigned long long kUnusedStride = 512;  // of dimensions of size 1

auto type_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kInt8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::kI64:
      return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

CUtensorMapSwizzle swizzle_of(const TensorShape& shape) {
  if (!shape.swizzled) return CU_TENSOR_MAP_SWIZZLE_NONE;
  return shape.box_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : shape.box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                 : CU_TENSOR_MAP_SWIZZLE_32B;
}

}  // namespace

void encode(const TensorShape& shape, TensorMapBlob* map, Promotion promotion) {
  std::array<unsigned long long, 4> dims{1, 1, 1, 1};
  std::array<unsigned long long, 3> byte_strides{kUnusedStride, kUnusedStride, kUnusedStride};
  if (!shape.empty()) {
    dims[0] = static_cast<unsigned long long>(shape.dim);
    const auto dimensions = outer_dimensions(shape);
    for (size_t i = 0; i < dimensions.size(); ++i) {
      const Dimension& d = dimensions[i];
      dims[i + 1] = static_cast<unsigned long long>(d.extent);
      if (d.extent == 1) continue;
      byte_strides[i] = static_cast<unsigned long long>(d.stride * size_of(shape.dtype));
    }
  }
  const auto columns = static_cast<unsigned>(shape.box_bytes / size_of(shape.dtype));
  const std::array<unsigned, 4> box{columns, static_cast<unsigned>(shape.box_rows), 1, 1};
  const std::array<unsigned, 4> every{1, 1, 1, 1};
  auto* const nowhere = reinterpret_cast<void*>(kCopyAlignment);  // the driver rejects null
  check(driver().cuTensorMapEncodeTiled(
            map, type_of(shape.dtype), 4, nowhere, dims.data(), byte_strides.data(), box.data(),
            every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(shape),
            promotion == Promotion::k128Bytes ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                              : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
}

void place(const TensorShape& shape, void* data, TensorMapBlob* map) {
  if (shape.empty()) {
    data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) / kCopyAlignment *
                                   kCopyAlignment);
  }
  check(driver().cuTensorMapReplaceAddress(map, data), "cuTensorMapReplaceAddress");
}

}  // namespace fulgur::cuda
