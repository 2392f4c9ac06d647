/// Low-bit tensors: memory of their codes and scales, and a decoder of codes in double precision
/// that knows nothing of the library's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fulgur/append.h"
#include "fulgur/codes/hadamard.h"
#include "storage.h"

namespace fulgur::test {

inline constexpr DType kFormats[] = {DType::kE4M3, DType::kE5M2,  DType::kInt8, DType::kInt4,
                                     DType::kQ8_0, DType::kQ4_0,  DType::kQ4_1, DType::kQ5_0,
                                     DType::kQ5_1, DType::kIQ4_NL};

inline bool scaled_inside(DType format) { return format >= DType::kQ8_0; }
inline bool has_zero_point(DType format) {
  return format == DType::kInt8 || format == DType::kInt4;
}

inline double float8(uint8_t bits, int exponent_bits) {
  const int fraction_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 127) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
  double x = exponent == 0
                 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                 : std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
  if (exponent_bits == 4 && (bits & 127) == 127) x = std::numeric_limits<double>::quiet_NaN();
  if (exponent_bits == 5 && exponent == 31)
    x = fraction == 0 ? std::numeric_limits<double>::infinity()
                      : std::numeric_limits<double>::quiet_NaN();
  return bits & 128 ? -x : x;
}

/// Number i of a row of codes, without a scale.
inline double decoded(DType format, const uint8_t* row, int64_t i) {
  const auto nibble = [](uint8_t byte, bool upper) { return upper ? byte >> 4 : byte & 15; };
  if (format == DType::kE4M3) return float8(row[i], 4);
  if (format == DType::kE5M2) return float8(row[i], 5);
  if (format == DType::kInt8) return row[i] < 128 ? row[i] : row[i] - 256;
  if (format == DType::kInt4) {
    const int code = nibble(row[i / 2], i % 2 == 1);
    return code < 8 ? code : code - 16;
  }
  const uint8_t* const block = row + i / 32 * size_of(format);
  const auto j = static_cast<int>(i % 32);
  const double scale = load(block, DType::kF16, 0), second = load(block + 2, DType::kF16, 0);
  const auto bit = [&](const uint8_t* from) { return (from[j / 8] >> (j % 8) & 1) << 4; };
  const auto lower = [&](int at) { return nibble(block[at + j % 16], j >= 16); };
  constexpr int kLevels[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};
  switch (format) {
    case DType::kQ8_0:
      return scale * (block[2 + j] < 128 ? block[2 + j] : block[2 + j] - 256);
    case DType::kQ4_0:
      return scale * (lower(2) - 8);
    case DType::kQ4_1:
      return scale * lower(4) + second;
    case DType::kQ5_0:
      return scale * ((lower(6) | bit(block + 2)) - 16);
    case DType::kQ5_1:
      return scale * (lower(8) | bit(block + 4)) + second;
    default:
      return scale * kLevels[lower(2)];
  }
}

enum class ScaleKind { kNone, kTensor, kHeads, kSequencesAndHeads, kRows, kGroups };

/// Memory of any dtype, row-major.
struct Buffer {
  std::vector<uint8_t> bytes;
  Tensor t{};

  Buffer() = default;
  Buffer(DType dtype, std::vector<int64_t> shape) {
    int64_t elements = 1;
    for (const int64_t n : shape) elements *= n;
    bytes.resize(static_cast<size_t>(bytes_of(dtype, elements)));
    t = Tensor::contiguous(bytes.data(), dtype, shape);
  }
};

/// Codes of a tensor and what scales them.
struct Coded {
  Buffer codes, scale, zero_point;

  /// Codes of (batch, rows, heads, dim) or packed (rows, heads, dim) numbers.
  static Coded of(const ConstTensor& x, DType format, ScaleKind kind, bool zero, DType scale_dtype,
                  int64_t group) {
    std::vector<int64_t> shape(x.shape.begin(), x.shape.begin() + x.rank), scales;
    const int64_t batch = x.rank == 4 ? shape[0] : 1, heads = shape[x.rank - 2];
    if (kind == ScaleKind::kTensor) scales = {1};
    if (kind == ScaleKind::kHeads) scales = {1, heads};
    if (kind == ScaleKind::kSequencesAndHeads) scales = {batch, heads};
    if (kind == ScaleKind::kRows || kind == ScaleKind::kGroups) {
      scales = shape;
      scales.back() = kind == ScaleKind::kRows ? 1 : shape.back() / group;
    }
    Coded c;
    c.codes = Buffer(format, shape);
    if (!scales.empty()) c.scale = Buffer(scale_dtype, scales);
    if (zero) c.zero_point = Buffer(scale_dtype, scales);
    quantize({.x = x, .codes = c.codes.t, .scale = c.scale.t, .zero_point = c.zero_point.t});
    return c;
  }

  /// The numbers, row-major.
  std::vector<double> numbers() const {
    const Tensor& t = codes.t;
    const int64_t dim = t.shape[t.rank - 1], heads = t.shape[t.rank - 2];
    const int64_t rows = t.shape[t.rank - 3], row_bytes = bytes_of(t.dtype, dim);
    std::vector<double> all;
    for (int64_t n = 0; n < t.numel(); ++n) {
      const int64_t row = n / dim, h = row % heads, b = row / heads / rows;
      double x = decoded(t.dtype, codes.bytes.data() + row * row_bytes, n % dim);
      const auto of = [&](const Tensor& s) {
        int64_t i = 0;
        if (s.rank == 2) i = (s.shape[0] == 1 ? 0 : b) * s.shape[1] + (s.shape[1] == 1 ? 0 : h);
        if (s.rank > 2) {
          const int64_t groups = s.shape[s.rank - 1];
          i = row * groups + n % dim / (dim / groups);
        }
        return load(s.data, s.dtype, i);
      };
      if (zero_point.t.given()) x -= of(zero_point.t);
      if (scale.t.given()) x *= of(scale.t);
      all.push_back(x);
    }
    return all;
  }
};

/// The signs D of hadamard(): row 0 of H has ones alone.
inline std::vector<double> signs_of_hadamard(int n) {
  Buffer unit(DType::kF32, {1, 1, n}), y(DType::kF32, {1, 1, n});
  std::vector<double> signs(static_cast<size_t>(n));
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < n; ++i) store(unit.t.data, DType::kF32, i, i == j);
    hadamard({unit.t, y.t}, {.threads = 1});
    signs[static_cast<size_t>(j)] = load(y.t.data, DType::kF32, 0) < 0 ? -1 : 1;
  }
  return signs;
}

/// Rows of d columns as the definition rotates them, or back: an entry of H of columns i and j is
/// -1 to the count of bits that both have.
inline std::vector<double> by_definition(const std::vector<double>& x, int64_t d, bool inverse) {
  const int n = static_cast<int>(std::min<int64_t>(d & -d, 512));
  const std::vector<double> signs = signs_of_hadamard(n);
  std::vector<double> y(x.size());
  for (size_t first = 0; first < x.size(); first += static_cast<size_t>(n)) {
    for (int i = 0; i < n; ++i) {
      double sum = 0;
      for (int j = 0; j < n; ++j) {
        const double h = __builtin_popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1 : -1;
        sum +=
            h * (inverse ? 1 : signs[static_cast<size_t>(j)]) * x[first + static_cast<size_t>(j)];
      }
      y[first + static_cast<size_t>(i)] =
          sum / std::sqrt(n) * (inverse ? signs[static_cast<size_t>(i)] : 1);
    }
  }
  return y;
}

/// Rows of a (batch, rows, ...) tensor, as pages that hold those of sequences in any order.
inline Buffer in_pages(const Buffer& from, int64_t page, int64_t pages,
                       const std::vector<std::vector<int32_t>>& ids) {
  const Tensor& t = from.t;
  Buffer to(t.dtype, {pages, page, t.shape[2], t.shape[3]});
  const auto row = from.bytes.size() / static_cast<size_t>(t.shape[0] * t.shape[1]);
  std::fill(to.bytes.begin(), to.bytes.end(), uint8_t{0x7f});  // NaN, or large
  for (int64_t b = 0; b < t.shape[0]; ++b) {
    for (int64_t j = 0; j < t.shape[1]; ++j) {
      const int64_t at =
          ids[static_cast<size_t>(b)][static_cast<size_t>(j / page)] * page + j % page;
      std::copy_n(from.bytes.begin() + static_cast<int64_t>(row) * (b * t.shape[1] + j), row,
                  to.bytes.begin() + static_cast<int64_t>(row) * at);
    }
  }
  return to;
}

}  // namespace fulgur::test
