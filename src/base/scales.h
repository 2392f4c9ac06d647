#pragma once

#include <cstdint>

#include "base/convert.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// Where the scales of a tensor of codes lie, or their zero points: strides, which are 0 where all
/// have the same.
struct Scales {
  DType dtype = DType::kF32;
  bool of_rows = false;  ///< lie as the rows of their tensor; else by sequence and kv head
  int64_t groups = 0;    ///< of columns; 0: not given
  int64_t batch = 0, row = 0, head = 0, group = 0;

  bool operator==(const Scales&) const = default;
  /// The element of a group of columns of a row, which lies at `row` and `head` of `entry` of its
  /// tensor; where scales are by sequence and kv head, those of b and kv.
  int64_t offset(int64_t b, int64_t kv, int64_t entry, int64_t at, int64_t h, int64_t g) const {
    return (of_rows ? entry * batch + at * row + h * head : b * batch + kv * head) + g * group;
  }
};

/// The codes that scales belong to: what a call names them, and how many sequences and kv heads
/// they are of.
struct Coded {
  const char* name;
  const ConstTensor& codes;
  int64_t batch, heads;
};

/// Checks scales of codes, and zero points, which may lack. Throw Error(kInvalidArgument).
Scales checked_scales(const char* name, const ConstTensor& t, const Coded& of);
Scales checked_zero_points(const char* name, const ConstTensor& t, const char* scale_name,
                           const ConstTensor& scale, const Coded& of);

/// Checks the means of the columns of codes, (batch or 1, heads, dim), which may lack. Throws
/// likewise.
void check_means(const char* name, const ConstTensor& t, const Coded& of);

/// The means of columns, which sequences or all of them share.
struct Means {
  const float* data = nullptr;
  int64_t batch = 0, head = 0;  ///< strides

  Means() = default;
  /// Of a tensor that is checked.
  explicit Means(const ConstTensor& t)
      : data(static_cast<const float*>(t.data)),
        batch(t.given() && t.shape[0] > 1 ? t.strides[0] : 0),
        head(t.strides[1]) {}
  /// Those of the columns of a head.
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

/// What makes numbers of codes: (code - zero point) * scale.
struct Scaling {
  ScaleTensor scale{}, zero_point{};

  bool given() const { return scale.given(); }
};

}  // namespace fulgur
