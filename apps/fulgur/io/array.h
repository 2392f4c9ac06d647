#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fulgur/error.h"
#include "fulgur/tensor.h"

namespace fulgur::io {

using Bytes = std::span<const std::byte>;

/// Throws Error(kInvalidArgument) with the message "<name>: <what>".
template <class... Args>
[[noreturn]] void fail(std::string_view name, fmt::format_string<Args...> what, Args&&... args) {
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: {}", name, fmt::format(what, std::forward<Args>(args)...)));
}

/// A row-major array in host memory that owns its elements.
class Array {
 public:
  /// No array: tensor() is "not given".
  Array() = default;
  /// Uninitialized elements. `shape` has 1 to 4 sizes >= 0. Throws Error(kInvalidArgument) for
  /// another rank, a negative size or a size in bytes beyond 2^63.
  Array(DType dtype, std::vector<int64_t> shape, std::string_view name = "array");

  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  bool given() const { return !shape_.empty(); }
  int64_t numel() const;
  int64_t size_bytes() const { return numel() * size_of(dtype_); }
  std::byte* data() { return data_.get(); }
  Bytes bytes() const { return {data_.get(), static_cast<size_t>(size_bytes())}; }
  /// A view; valid as long as the array.
  Tensor tensor() const;

  /// Copies the elements into another dtype (f32, f64, f16, bf16), rounding to nearest even.
  /// Throws Error(kInvalidArgument) for i32.
  Array converted(DType to, std::string_view name = "array") const;

 private:
  DType dtype_ = DType::kF32;
  std::vector<int64_t> shape_;
  std::unique_ptr<std::byte[]> data_;
};

/// The bytes that `shape` takes. Throws as the constructor of Array does.
int64_t size_bytes(DType dtype, std::span<const int64_t> shape, std::string_view name);

}  // namespace fulgur::io
