/// Parts of tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "fulgur/tensor.h"

namespace fulgur::distributed {

/// A part of a tensor, of shape (batch, rows, heads, dim).
struct Part {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> shape{}, strides{};
  Device device{};

  int64_t bytes() const;
  Part rows(int64_t begin, int64_t count) const { return slice(1, begin, count); }
  Part heads(int64_t begin, int64_t count) const { return slice(2, begin, count); }
  Part slice(int dim, int64_t begin, int64_t count) const;
  /// The same part with another dtype.
  Part as(DType other) const {
    Part part = *this;
    part.dtype = other;
    return part;
  }
  bool operator==(const Part&) const = default;

  /// A tensor of rows, batched or packed; a packed one has batch 1.
  static Part of_rows(const ConstTensor& t);
  /// LSE and tensors of its shape: (batch, heads, rows) or (heads, rows).
  static Part of_lse(const ConstTensor& t);
  /// The tensor (batch, rows, heads, dim), or (batch, heads, rows).
  Tensor tensor() const;
  Tensor lse() const;
  /// A contiguous part of this shape, in the order of dimensions in which all ranks send it.
  Part packed(std::byte* to) const;
};

/// Lines of `width` bytes at a distance of `pitch` bytes, in two parts of the same shape.
struct Lines {
  std::byte* from;
  std::byte* to;
  int64_t from_pitch, to_pitch, width, count;

  bool side_by_side() const { return count == 1 || (from_pitch == width && to_pitch == width); }
};

/// Calls visit(Lines) as few times as cover all elements of two parts.
template <class Visit>
void each_lines(const Part& from, const Part& to, const Visit& visit) {
  const int64_t element = size_of(from.dtype);
  const auto& [batches, rows, heads, dim] = from.shape;
  const auto side_by_side = [&](int at, int64_t stride) {
    return from.shape[at] == 1 || (from.strides[at] == stride && to.strides[at] == stride);
  };
  const auto lines = [&](int64_t b, int64_t h, int by, int64_t width, int64_t count) {
    const auto at = [&](const Part& x) {
      return x.data + (b * x.strides[0] + h * x.strides[2]) * element;
    };
    visit(Lines{at(from), at(to), from.strides[by] * element, to.strides[by] * element,
                width * element, count});
  };
  if (batches * rows * heads * dim == 0) return;
  for (int64_t b = 0; b < batches; ++b) {
    if (dim == 1 && side_by_side(1, 1)) {  // LSE
      lines(b, 0, 2, rows, heads);
    } else if (side_by_side(2, dim)) {
      lines(b, 0, 1, heads * dim, rows);
    } else {
      for (int64_t h = 0; h < heads; ++h) lines(b, h, 1, dim, rows);
    }
  }
}

}  // namespace fulgur::distributed
