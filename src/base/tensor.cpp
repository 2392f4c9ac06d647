#include "fulgur/tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "fulgur/error.h"

namespace fulgur {

constexpr int kDlBool = 6;  // kDLBool, which older DLPack headers lack

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
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
  }
  return 0;
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
  }
  return "?";
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
  } else {
    fail(fmt::format(
        "dtype has DLPack code {}, {} bits, {} lanes; want f16, bf16, f32, f64, i32, i64 or bool",
        int{type.code}, int{type.bits}, int{type.lanes}));
  }
  // As a number: a newer DLPack may have device types that this enum lacks.
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
  const BasicTensor rows =
      contiguous(nullptr, t.dtype, std::span<const int64_t>(in.shape, in.ndim), t.device);
  t.rank = rows.rank;
  t.shape = rows.shape;
  t.strides = rows.strides;
  if (in.strides != nullptr) std::copy_n(in.strides, in.ndim, t.strides.begin());
  if (in.data != nullptr) t.data = static_cast<char*>(in.data) + in.byte_offset;
  return t;
}

template <class Void>
int64_t BasicTensor<Void>::numel() const {
  if (rank == 0) return 0;
  // Looked for first: the product of the others may overflow.
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
