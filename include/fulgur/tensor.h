#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "fulgur/export.h"

namespace fulgur {

/// kBool: a byte, 0 or 1. From kE4M3 on: the low-bit formats of append.h. kU8: bytes that as()
/// reads as a format.
enum class DType : uint8_t {
  kF16,
  kBF16,
  kF32,
  kF64,
  kI32,
  kI64,
  kBool,
  kU8,
  kE4M3,
  kE5M2,
  kInt8,
  kInt4,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIQ4_NL
};
enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// Elements of a block, which lie together in memory: 1 but for int4 (2) and ggml's formats (32).
FULGUR_API int64_t block_of(DType dtype);
/// Bytes of a block; of an element where that is a block of its own.
FULGUR_API int64_t size_of(DType dtype);
/// Bytes of so many elements, a multiple of the block.
inline int64_t bytes_of(DType dtype, int64_t elements) {
  const int64_t block = dtype < DType::kE4M3 ? 1 : block_of(dtype);  // divisions are slow
  return (block == 1 ? elements : elements / block) * size_of(dtype);
}
/// "f16", "bf16", "f32", "f64", "i32", "i64", "bool", "u8", or that of a low-bit format.
FULGUR_API const char* name_of(DType dtype);
/// "cpu" or "cuda:0".
FULGUR_API std::string name_of(Device device);

/// The dtype of a C++ type. Specialize it for your own 16-bit types:
///   template <> inline constexpr fulgur::DType fulgur::kDTypeOf<my_bf16> = fulgur::DType::kBF16;
template <class T>
inline constexpr DType kDTypeOf = [] {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double> ||
                    std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> ||
                    std::is_same_v<T, bool>,
                "fulgur::kDTypeOf is not specialized for this type");
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kI64;
  if constexpr (std::is_same_v<T, bool>) return DType::kBool;
  return DType::kF32;
}();

/// What std::mdspan and its like offer: strides in elements.
template <class M>
concept StridedView = requires(const M& m) {
  { m.data_handle() } -> std::convertible_to<const void*>;
  { m.rank() } -> std::convertible_to<std::size_t>;
  { m.extent(0) } -> std::convertible_to<int64_t>;
  { m.stride(0) } -> std::convertible_to<int64_t>;
};

/// A view of memory that it does not own: the data, dtype, device, shape and strides of a DLPack
/// tensor of at most four dimensions. Shape and strides count elements; of formats with blocks they
/// are multiples of the block, but for the last stride, which is 1. A default-constructed one (rank
/// 0) means "not given". `Void` is void for a Tensor, which may be written, and const void for a
/// ConstTensor; the first converts to the second, never back.
template <class Void>
struct FULGUR_API BasicTensor {
  static constexpr int kMaxRank = 4;
  static constexpr bool kConst = std::is_const_v<Void>;

  Void* data = nullptr;
  DType dtype = DType::kF32;
  Device device;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  /// A row-major view of `data` with the given shape (1 to 4 dimensions).
  static BasicTensor contiguous(Void* data, DType dtype, std::span<const int64_t> shape,
                                Device device = {});
  static BasicTensor contiguous(Void* data, DType dtype, std::initializer_list<int64_t> shape,
                                Device device = {}) {
    return contiguous(data, dtype, std::span(shape.begin(), shape.size()), device);
  }

  /// A row-major view of `elements`, as many as the shape has. Throws Error(kInvalidArgument) where
  /// they are fewer or more.
  template <class T>
  requires(kConst || !std::is_const_v<T>) static BasicTensor
      of(std::span<T> elements, std::initializer_list<int64_t> shape, Device device = {}) {
    const BasicTensor t =
        contiguous(elements.data(), kDTypeOf<std::remove_const_t<T>>, shape, device);
    check_count(t, elements.size());
    return t;
  }

  /// The view of a std::mdspan, or of what offers the same, of rank 1 to 4.
  template <StridedView M>
  static BasicTensor of(const M& view, Device device = {}) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(view.data_handle())>>;
    std::array<int64_t, kMaxRank> shape{}, strides{};
    const std::size_t rank = checked_rank(view.rank());
    for (std::size_t i = 0; i < rank; ++i) {
      shape[i] = static_cast<int64_t>(view.extent(i));
      strides[i] = static_cast<int64_t>(view.stride(i));
    }
    BasicTensor t =
        contiguous(view.data_handle(), kDTypeOf<T>, std::span(shape).first(rank), device);
    t.strides = strides;
    return t;
  }

  /// A view of a DLPack tensor (byte_offset applied; strides may be null = row-major).
  /// Throws Error(kInvalidArgument) naming `name` for a dtype, device or rank that fulgur lacks.
  static BasicTensor from_dlpack(const DLTensor& tensor, const char* name = "tensor");

  /// A tensor of bytes (u8) as elements of a format with blocks; the last dimension counts bytes
  /// before and elements after: q8_0 (..., 34) is (..., 32). Throws Error(kInvalidArgument) naming
  /// `name`.
  BasicTensor as(DType format, const char* name = "tensor") const;

  bool given() const { return rank > 0; }
  /// Number of elements; 0 when not given.
  int64_t numel() const;
  /// "f32 (2, 128, 8, 64)".
  std::string describe() const;

  operator BasicTensor<const void>() const requires(!kConst) {
    return {data, dtype, device, rank, shape, strides};
  }

 private:
  /// Throws Error(kInvalidArgument).
  static std::size_t checked_rank(std::size_t rank);
  static void check_count(const BasicTensor& tensor, std::size_t elements);
};

/// A tensor that a call writes.
using Tensor = BasicTensor<void>;
/// A tensor that a call reads.
using ConstTensor = BasicTensor<const void>;

extern template struct BasicTensor<void>;
extern template struct BasicTensor<const void>;

}  // namespace fulgur
