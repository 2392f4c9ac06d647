/// Memory for tests: tensors with arbitrary strides inside one poisoned, guarded buffer.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "fulgur/tensor.h"

namespace fulgur::test {

/// Element `index` of `data` as a double, and its write (rounded to nearest even).
double load(const void* data, DType dtype, int64_t index);
void store(void* data, DType dtype, int64_t index, double value);
/// `value` rounded to `dtype`.
double rounded(double value, DType dtype);

/// A standard normal number, the same on every platform.
double normal(std::mt19937_64& random);

/// The elements of a tensor as doubles, in row-major order of its shape; and their write.
std::vector<double> read(const ConstTensor& tensor);
void write(const Tensor& tensor, std::span<const double> values);
/// Every element drawn from the standard normal distribution, times `scale`.
void randomize(const Tensor& tensor, std::mt19937_64& random, double scale = 1);
/// The bits of a tensor's elements in row-major order, for bitwise comparison.
std::vector<std::byte> bits(const ConstTensor& tensor);

/// A buffer of NaN (integers: a large odd number) with guard zones around it. Tensors are views
/// into it; `seal()` takes a picture that later checks compare with.
class Storage {
 public:
  Storage(DType dtype, int64_t elements);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  /// The Storage that lives around an address; null where there is none.
  static Storage* around(const void* data);

  /// A view whose first element is element `offset`. Its elements count as part of a tensor.
  Tensor view(int64_t offset, std::span<const int64_t> shape, std::span<const int64_t> strides);
  /// All of it, guard zones included.
  std::span<std::byte> bytes() { return bytes_; }
  /// Writes the poison over every element again.
  void poison();
  void seal() { sealed_ = bytes_; }
  /// The elements that belong to no view keep the bits they had when sealed.
  testing::AssertionResult padding_unchanged() const { return unchanged(false); }
  /// Every element keeps the bits it had when sealed.
  testing::AssertionResult all_unchanged() const { return unchanged(true); }

 private:
  static constexpr int64_t kGuard = 64;  // elements on either side
  testing::AssertionResult unchanged(bool also_views) const;

  DType dtype_;
  int64_t elements_;
  std::vector<std::byte> bytes_, sealed_;
  std::vector<bool> in_view_;
};

/// A row-major tensor that owns its memory.
class Dense {
 public:
  Dense(DType dtype, std::initializer_list<int64_t> shape);
  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  operator ConstTensor() const { return tensor_; }
  Storage& storage() { return storage_; }

 private:
  Storage storage_;
  Tensor tensor_;
};

}  // namespace fulgur::test
