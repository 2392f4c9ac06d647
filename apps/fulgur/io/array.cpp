#include "io/array.h"

#include <fmt/ranges.h>

#include "io/convert.h"

namespace fulgur::io {
namespace {

template <class Read>
void convert(int64_t n, DType to, std::byte* out, Read read) {
  const auto fill = [&](auto* typed, auto write) {
    for (int64_t i = 0; i < n; ++i) typed[i] = write(read(i));
  };
  switch (to) {
    case DType::kF16:
      return fill(reinterpret_cast<uint16_t*>(out), to_f16);
    case DType::kBF16:
      return fill(reinterpret_cast<uint16_t*>(out), to_bf16);
    case DType::kF32:
      return fill(reinterpret_cast<float*>(out), [](double x) { return static_cast<float>(x); });
    case DType::kF64:
      return fill(reinterpret_cast<double*>(out), [](double x) { return x; });
    default:
      break;
  }
}

}  // namespace

int64_t size_bytes(DType dtype, std::span<const int64_t> shape, std::string_view name) {
  if (shape.empty() || shape.size() > Tensor::kMaxRank) {
    fail(name, "got {} dimensions, want 1 to {}", shape.size(), int{Tensor::kMaxRank});
  }
  int64_t bytes = size_of(dtype);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) fail(name, "got negative size {} in shape ({})", size, fmt::join(shape, ", "));
    empty |= size == 0;
  }
  for (const int64_t size : shape) {
    if (!empty && __builtin_mul_overflow(bytes, size, &bytes)) {
      fail(name, "shape ({}) needs more than 2^63 bytes", fmt::join(shape, ", "));
    }
  }
  return empty ? 0 : bytes;
}

Array::Array(DType dtype, std::vector<int64_t> shape, std::string_view name)
    : dtype_(dtype), shape_(std::move(shape)) {
  data_ = std::make_unique_for_overwrite<std::byte[]>(
      static_cast<size_t>(io::size_bytes(dtype, shape_, name)));
}

int64_t Array::numel() const {
  return given() ? io::size_bytes(dtype_, shape_, "array") / size_of(dtype_) : 0;
}

Tensor Array::tensor() const {
  return given() ? Tensor::contiguous(data_.get(), dtype_, shape_) : Tensor{};
}

Array Array::converted(DType to, std::string_view name) const {
  const auto is_number = [](DType dtype) {
    return dtype != DType::kI32 && dtype != DType::kI64 && dtype != DType::kBool;
  };
  if (!is_number(dtype_) || !is_number(to)) {
    fail(name, "got {}, cannot convert it to {}", name_of(dtype_), name_of(to));
  }
  Array out(to, shape_);
  const std::byte* data = data_.get();
  const auto from = [&](auto* typed, auto widen) {
    convert(numel(), to, out.data(), [&](int64_t i) { return widen(typed[i]); });
  };
  const auto as_double = [](auto x) { return static_cast<double>(x); };
  switch (dtype_) {
    case DType::kF16:
      from(reinterpret_cast<const uint16_t*>(data), from_f16);
      break;
    case DType::kBF16:
      from(reinterpret_cast<const uint16_t*>(data), from_bf16);
      break;
    case DType::kF32:
      from(reinterpret_cast<const float*>(data), as_double);
      break;
    case DType::kF64:
      from(reinterpret_cast<const double*>(data), as_double);
      break;
    default:
      break;
  }
  return out;
}

}  // namespace fulgur::io
