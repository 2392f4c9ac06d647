#pragma once

#include <algorithm>
#include <cstdint>

#include "base/convert.h"

namespace fulgur {

// Rotary position embedding of single rows, which are read and rounded once. The loops are plain,
// for compilers to vectorize.

/// The first n elements of a row, as T: float, or double.
template <class T>
void load_row(const void* row, DType dtype, int64_t n, T* __restrict to) {
  switch (dtype) {
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i) to[i] = f32_from_f16(static_cast<const uint16_t*>(row)[i]);
      break;
    case DType::kBF16:
      for (int64_t i = 0; i < n; ++i) to[i] = f32_from_bf16(static_cast<const uint16_t*>(row)[i]);
      break;
    case DType::kF32:
      std::copy_n(static_cast<const float*>(row), n, to);
      break;
    default:
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(static_cast<const double*>(row)[i]);
  }
}

/// Rounds n elements to nearest, ties to even. An f64 row takes doubles, the others floats.
template <class T>
void store_row(void* row, DType dtype, int64_t n, const T* __restrict from) {
  switch (dtype) {
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i)
        static_cast<uint16_t*>(row)[i] = f16_from_f32(static_cast<float>(from[i]));
      break;
    case DType::kBF16:
      for (int64_t i = 0; i < n; ++i)
        static_cast<uint16_t*>(row)[i] = bf16_from_f32(static_cast<float>(from[i]));
      break;
    case DType::kF32:
      for (int64_t i = 0; i < n; ++i) static_cast<float*>(row)[i] = static_cast<float>(from[i]);
      break;
    default:
      std::copy_n(from, n, static_cast<double*>(row));
  }
}

/// Turns `pairs` pairs of columns, (2 i, 2 i + 1) or (i, i + pairs), by the angles whose cos and
/// sin are given.
template <class T>
void rotate_row(const T* __restrict x, const T* __restrict cos, const T* __restrict sin,
                int64_t pairs, bool interleaved, T* __restrict y) {
  const auto rotate = [&](int64_t i, int64_t a, int64_t b) {
    y[a] = x[a] * cos[i] - x[b] * sin[i];
    y[b] = x[a] * sin[i] + x[b] * cos[i];
  };
  if (interleaved) {
    for (int64_t i = 0; i < pairs; ++i) rotate(i, 2 * i, 2 * i + 1);
  } else {
    for (int64_t i = 0; i < pairs; ++i) rotate(i, i, i + pairs);
  }
}

}  // namespace fulgur
