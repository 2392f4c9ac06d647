#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "fulgur/tensor.h"

namespace fulgur {

// Scalar conversions, one element at a time: for the reference engine and for merging. The fast
// engines convert whole vectors.

inline float f32_from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline uint16_t bf16_from_f32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The conversions of f16 mask results instead of branching, so that loops over them vectorize.

inline float f32_from_f16(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16, magnitude = x & 0x7fffu;
  // Scaling by 2^112 moves the exponent from bias 15 to 127, subnormals included.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000u : 0u;  // infinity, NaN
  return std::bit_cast<float>(sign | special | std::bit_cast<uint32_t>(value));
}

inline uint16_t f16_from_f32(float x) {
  const uint32_t all = std::bit_cast<uint32_t>(x), sign = (all >> 16) & 0x8000u;
  const uint32_t magnitude = all & 0x7fffffffu, bits = magnitude - (112u << 23);
  const uint32_t normal = (bits + 0xfff + ((bits >> 13) & 1)) >> 13;
  // Subnormals are multiples of 2^-24, the unit of numbers from 0.5 on: the sum rounds to them.
  const float moved = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(moved) - std::bit_cast<uint32_t>(0.5f);
  const auto all_if = [](bool holds) { return -static_cast<uint32_t>(holds); };
  const uint32_t small = all_if(magnitude < std::bit_cast<uint32_t>(0x1p-14f));
  const uint32_t large = all_if(magnitude >= std::bit_cast<uint32_t>(65520.0f));  // or NaN
  const uint32_t nan = all_if(magnitude > 0x7f800000u);
  const uint32_t finite = (subnormal & small) | (normal & ~small);
  return static_cast<uint16_t>(sign | (finite & ~large) | (large & 0x7c00u) | (nan & 0x200u));
}

/// Codes of a format of base/formats.h.
constexpr bool is_low_bit(DType dtype) { return dtype >= DType::kE4M3; }

/// Number `i` of an array of codes of a low-bit format (base/formats.h), without scales that lie in
/// a tensor of their own.
float load_code(const void* codes, DType format, int64_t i);

/// Element `i` of an array of `dtype`.
inline double load_element(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF16:
      return f32_from_f16(static_cast<const uint16_t*>(data)[i]);
    case DType::kBF16:
      return f32_from_bf16(static_cast<const uint16_t*>(data)[i]);
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF64:
      return static_cast<const double*>(data)[i];
    case DType::kI32:
      return static_cast<const int32_t*>(data)[i];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(data)[i]);
    case DType::kBool:
      return static_cast<const uint8_t*>(data)[i] != 0 ? 1 : 0;
    case DType::kU8:
      return static_cast<const uint8_t*>(data)[i];
    default:
      return load_code(data, dtype, i);
  }
}

/// Rounds `x` to nearest, ties to even (16-bit types by way of f32). Not to a low-bit format.
inline void store_element(void* data, DType dtype, int64_t i, double x) {
  switch (dtype) {
    case DType::kF16:
      static_cast<uint16_t*>(data)[i] = f16_from_f32(static_cast<float>(x));
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[i] = bf16_from_f32(static_cast<float>(x));
      break;
    case DType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case DType::kF64:
      static_cast<double*>(data)[i] = x;
      break;
    case DType::kI32:
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(x);
      break;
    case DType::kI64:
      static_cast<int64_t*>(data)[i] = static_cast<int64_t>(x);
      break;
    case DType::kBool:
      static_cast<uint8_t*>(data)[i] = x != 0 ? 1 : 0;
      break;
    default:
      break;
  }
}

}  // namespace fulgur
