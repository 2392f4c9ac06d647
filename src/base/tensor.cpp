#include "fulgur/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "base/formats.h"
#include "fulgur/error.h"

namespace fulgur {

// Older DLPack headers lack kDLBool, kDLFloat8_e4m3fn and kDLFloat8_e5m2.
constexpr int kDlBool = 6, kDlE4M3 = 10, kDlE5M2 = 12;

int64_t block_of(DType dtype) {
  const FormatRow* const format = format_of(dtype);
  return format == nullptr ? 1 : format->block;
}

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return 1;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
    default:
      return format_of(dtype)->bytes;
  }
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kBool:
      return "bool";
    case DType::kU8:
      return "u8";
    default:
      return format_of(dtype)->name;
  }
}

std::string name_of(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

template <class Void>
size_t BasicTensor<Void>::checked_rank(size_t rank) {
  if (rank >= 1 && rank <= kMaxRank) return rank;
  throw Error(Status::kInvalidArgument,
              fmt::format("shape: got {} dimensions, want 1 to {}", rank, int{kMaxRank}));
}

template <class Void>
void BasicTensor<Void>::check_count(const BasicTensor& t, size_t count) {
  if (static_cast<size_t>(t.numel()) == count) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("elements: got {}, want the {} of {}", count, t.numel(), t.describe()));
}

template <class Void>
BasicTensor<Void> BasicTensor<Void>::contiguous(Void* data, DType dtype,
                                                std::span<const int64_t> shape, Device device) {
  BasicTensor t;
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  t.rank = static_cast<int>(checked_rank(shape.size()));
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    // A wrapped stride belongs to a shape that validation rejects.
    if (shape[i] > 1 && __builtin_mul_overflow(stride, shape[i], &stride)) stride = INT64_MAX;
  }
  return t;
}

template <class Void>
BasicTensor<Void> BasicTensor<Void>::from_dlpack(const DLTensor& in, const char* name) {
  const auto fail = [&](const std::string& what) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: {}", name, what));
  };
  BasicTensor t;
  const DLDataType type = in.dtype;
  const auto is = [&](int code, int bits) {
    return type.code == code && type.bits == bits && type.lanes == 1;
  };
  if (is(kDLFloat, 16)) {
    t.dtype = DType::kF16;
  } else if (is(kDLBfloat, 16)) {
    t.dtype = DType::kBF16;
  } else if (is(kDLFloat, 32)) {
    t.dtype = DType::kF32;
  } else if (is(kDLFloat, 64)) {
    t.dtype = DType::kF64;
  } else if (is(kDLInt, 32)) {
    t.dtype = DType::kI32;
  } else if (is(kDLInt, 64)) {
    t.dtype = DType::kI64;
  } else if (is(kDlBool, 8)) {
    t.dtype = DType::kBool;
  } else if (is(kDLUInt, 8)) {
    t.dtype = DType::kU8;
  } else if (is(kDLInt, 8)) {
    t.dtype = DType::kInt8;
  } else if (is(kDlE4M3, 8)) {
    t.dtype = DType::kE4M3;
  } else if (is(kDlE5M2, 8)) {
    t.dtype = DType::kE5M2;
  } else {
    fail(fmt::format(
        "dtype has DLPack code {}, {} bits, {} lanes; want f16, bf16, f32, f64, i32, i64, bool, "
        "u8, int8, e4m3 or e5m2",
        int{type.code}, int{type.bits}, int{type.lanes}));
  }
  // Read as a number, because a newer DLPack may have device types that this enum lacks.
  int32_t device_type;
  std::memcpy(&device_type, &in.device.device_type, sizeof device_type);
  switch (device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      t.device = {DeviceType::kCpu, 0};
      break;
    case kDLCUDA:
    case kDLCUDAManaged:
      t.device = {DeviceType::kCuda, in.device.device_id};
      break;
    default:
      fail(fmt::format("DLPack device type {}, want CPU (1) or CUDA (2)", device_type));
  }
  if (in.ndim < 1 || in.ndim > kMaxRank) {
    fail(fmt::format("got {} dimensions, want 1 to {}", in.ndim, int{kMaxRank}));
  }
  if (in.shape == nullptr) fail("shape is null");
  if (in.strides == nullptr) {
    t = contiguous(nullptr, t.dtype, std::span<const int64_t>(in.shape, in.ndim), t.device);
  } else {
    t.rank = in.ndim;
    std::copy_n(in.shape, in.ndim, t.shape.begin());
    std::copy_n(in.strides, in.ndim, t.strides.begin());
  }
  if (in.data != nullptr) t.data = static_cast<char*>(in.data) + in.byte_offset;
  return t;
}

template <class Void>
BasicTensor<Void> BasicTensor<Void>::as(DType format, const char* name) const {
  const auto fail = [&](const std::string& what) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: {}", name, what));
  };
  BasicTensor t = *this;
  t.dtype = format;
  if (!given() || dtype == format) return t;
  if (dtype != DType::kU8) {
    fail(fmt::format("got {}, want {}, or its bytes as u8", name_of(dtype), name_of(format)));
  }
  const int64_t bytes = size_of(format);
  const bool empty = numel() == 0;  // strides may be any
  for (int i = rank - 1; i >= 0; --i) {
    const bool last = i == rank - 1;
    if (last && shape[i] > 1 && strides[i] != 1 && !empty) {
      fail(fmt::format("last stride is {}, want 1, as bytes of {} have", strides[i],
                       name_of(format)));
    }
    const int64_t count = last ? shape[i] : strides[i];
    if (count % bytes != 0 && (last || (shape[i] > 1 && !empty))) {
      fail(fmt::format("got {} {}, want a multiple of the {} bytes of a block of {}",
                       last ? "rows of" : "a stride of", count, bytes, name_of(format)));
    }
    (last ? t.shape : t.strides)[i] = count / bytes * block_of(format);
  }
  return t;
}

template <class Void>
int64_t BasicTensor<Void>::numel() const {
  if (rank == 0) return 0;
  // Sizes of 0 first: the product of the other sizes may overflow.
  if (std::find(shape.begin(), shape.begin() + rank, 0) != shape.begin() + rank) return 0;
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= shape[i];
  return n;
}

template <class Void>
std::string BasicTensor<Void>::describe() const {
  if (!given()) return "no tensor";
  return fmt::format("{} ({})", name_of(dtype),
                     fmt::join(shape.begin(), shape.begin() + rank, ", "));
}

template struct BasicTensor<void>;
template struct BasicTensor<const void>;

}  // namespace fulgur
