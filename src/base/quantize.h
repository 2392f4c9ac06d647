#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/formats.h"
#include "base/scales.h"

namespace fulgur {

/// A scale and a zero point as their tensors have them.
struct ScaleOfCodes {
  float scale = 1, zero_point = 0;
};

/// Codes and what scales them, where they are written: of quantize(), or of a cache.
struct CodeTensor {
  const FormatRow& format;
  void* codes;
  Layout at;
  int64_t columns;
  Scaling scaling;
  void *scale = nullptr, *zero_point = nullptr;  ///< as in `scaling`
  Means means{};                                 ///< of its columns, which codes have not

  /// A row of a tensor, which belongs to sequence b and kv head h: (entry, row, h).
  struct Row {
    int64_t b, entry, row, h;
  };

  /// The scale that numbers of these extremes take.
  ScaleOfCodes fit(const Extremes& extremes) const;
  void store(const ScaleOfCodes& x, const Row& row, int64_t group) const;
  ScaleOfCodes load(const Row& row, int64_t group) const;
  /// A row of numbers less the means of its columns.
  void take_means(const Row& row, float* x) const;
  /// Writes the codes of a row of numbers, which it overwrites, and the scales where those are of
  /// rows and not `fixed`.
  void put(const Row& row, float* x, bool fixed) const;
};

/// Checked.
struct QuantizeCall {
  ConstTensor x;
  CodeTensor to;
  bool fixed;   ///< scales are given
  Tensor mean;  ///< where it is given, it takes the means of x, which are those of `to`
  int64_t batch, rows, heads;
};

/// The inverse, likewise: numbers of codes go to x.
struct DequantizeCall {
  CodeTensor from;
  Tensor x;
  int64_t batch, rows, heads;
};

/// Of tensors in the host's memory.
void quantize(const QuantizeCall& call, int threads);
void dequantize(const DequantizeCall& call, int threads);

}  // namespace fulgur
