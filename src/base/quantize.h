#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/formats.h"
#include "base/scales.h"

namespace fulgur {

/// A scale and a zero point, rounded as their tensors store them.
struct ScaleOfCodes {
  float scale = 1, zero_point = 0;
};

/// A tensor of codes with its scales, zero points and means, which quantize() or append() writes.
struct CodeTensor {
  const FormatRow& format;
  void* codes;
  Layout at;
  int64_t columns;
  Scaling scaling;
  void *scale = nullptr, *zero_point = nullptr;  ///< as in `scaling`
  Means means{};  ///< of the columns, subtracted from the numbers before they become codes

  /// A row of a tensor, which belongs to sequence b and kv head h: (entry, row, h).
  struct Row {
    int64_t b, entry, row, h;
  };

  /// The scale and zero point of numbers with these extremes.
  ScaleOfCodes fit(const Extremes& extremes) const;
  void store(const ScaleOfCodes& x, const Row& row, int64_t group) const;
  ScaleOfCodes load(const Row& row, int64_t group) const;
  /// Subtracts the means of the columns from a row of numbers.
  void take_means(const Row& row, float* x) const;
  /// Writes the codes of a row of numbers, which it overwrites, and the scales of the row, unless
  /// these are `fixed` or not of rows.
  void put(const Row& row, float* x, bool fixed) const;
};

/// A call of quantize() whose arguments are checked.
struct QuantizeCall {
  ConstTensor x;
  CodeTensor to;
  bool fixed;   ///< scales are given
  Tensor mean;  ///< takes the means of x, which `to` then subtracts; may not be given
  int64_t batch, rows, heads;
};

/// A call of dequantize(), which writes the numbers of codes to x, whose arguments are checked.
struct DequantizeCall {
  CodeTensor from;
  Tensor x;
  int64_t batch, rows, heads;
};

/// Compute calls whose tensors lie in host memory.
void quantize(const QuantizeCall& call, int threads);
void dequantize(const DequantizeCall& call, int threads);

}  // namespace fulgur
