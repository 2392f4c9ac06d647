#pragma once

#include <cstdint>

#include "base/convert.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// The strides of the scales, or the zero points, of a tensor of codes; 0 in dimensions that share
/// scales.
struct Scales {
  DType dtype = DType::kF32;
  bool of_rows = false;  ///< one for each row of the codes; if not, by sequence and kv head
  int64_t groups = 0;    ///< groups of columns of a row; 0: not given
  int64_t batch = 0, row = 0, head = 0, group = 0;

  bool operator==(const Scales&) const = default;
  /// The offset of the scale of group g of the columns of a row: of the row at (entry, at, h) of
  /// the codes, or of sequence b and kv head `kv`.
  int64_t offset(int64_t b, int64_t kv, int64_t entry, int64_t at, int64_t h, int64_t g) const {
    return (of_rows ? entry * batch + at * row + h * head : b * batch + kv * head) + g * group;
  }
};

/// The codes that scales belong to: their name in errors, and the numbers of sequences and kv
/// heads.
struct Coded {
  const char* name;
  const ConstTensor& codes;
  int64_t batch, heads;
};

/// Check the scales and the zero points of codes; zero points need not be given. Throw
/// Error(kInvalidArgument).
Scales checked_scales(const char* name, const ConstTensor& t, const Coded& of);
Scales checked_zero_points(const char* name, const ConstTensor& t, const char* scale_name,
                           const ConstTensor& scale, const Coded& of);

/// Checks the means of the columns of codes, (batch or 1, heads, dim), which need not be given.
/// Throws Error(kInvalidArgument).
void check_means(const char* name, const ConstTensor& t, const Coded& of);

/// The means of the columns of each head, of one sequence or of all.
struct Means {
  const float* data = nullptr;
  int64_t batch = 0, head = 0;  ///< strides

  Means() = default;
  /// The tensor has passed check_means().
  explicit Means(const ConstTensor& t)
      : data(static_cast<const float*>(t.data)),
        batch(t.given() && t.shape[0] > 1 ? t.strides[0] : 0),
        head(t.strides[1]) {}
  /// The means of the columns of head h of sequence b.
  const float* of(int64_t b, int64_t h) const {
    return data == nullptr ? nullptr : data + b * batch + h * head;
  }
};

/// The scales, or zero points, of a tensor of codes.
struct ScaleTensor {
  const void* data = nullptr;
  Scales at{};

  bool given() const { return at.groups > 0; }
  float operator[](int64_t i) const {
    return at.dtype == DType::kF32 ? static_cast<const float*>(data)[i]
                                   : f32_from_f16(static_cast<const uint16_t*>(data)[i]);
  }
  float of(int64_t b, int64_t kv, int64_t entry, int64_t row, int64_t head, int64_t group) const {
    return (*this)[at.offset(b, kv, entry, row, head, group)];
  }
};

/// The scales and zero points of codes. The number of a code is (code - zero point) * scale.
struct Scaling {
  ScaleTensor scale{}, zero_point{};

  bool given() const { return scale.given(); }
};

}  // namespace fulgur
