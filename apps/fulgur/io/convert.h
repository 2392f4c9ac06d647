#pragma once

#include <bit>
#include <cstdint>

/// Conversions between the floating-point formats, rounding to nearest, ties to even.
namespace fulgur::io {

/// The bits of `x` in a 16-bit format of kExponent and kMantissa bits. Rounds once, so that a
/// double needs no detour over float. Overflow gives infinity; a NaN stays one (quiet).
template <int kExponent, int kMantissa>
constexpr uint16_t narrow(double x) {
  constexpr uint64_t kInfinity = ((uint64_t{1} << kExponent) - 1) << kMantissa;
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const auto sign = static_cast<uint16_t>(bits >> 63 << 15);
  if (x != x) return sign | kInfinity | (1 << (kMantissa - 1));

  const int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023 + kBias;
  if (exponent >= (1 << kExponent) - 1) return sign | kInfinity;
  // The mantissa with its leading one, cut at the last bit that the result has: a subnormal
  // (exponent <= 0) has fewer. What is below half of that bit's place is lost.
  const uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
  const int shift = 52 - kMantissa + (exponent < 1 ? 1 - exponent : 0);
  if (shift > 53) return sign;
  uint64_t kept = mantissa >> shift;
  const uint64_t rest = mantissa & ((uint64_t{1} << shift) - 1);
  const uint64_t half = uint64_t{1} << (shift - 1);
  kept += rest > half || (rest == half && (kept & 1));
  // The leading one adds 1 to the exponent; a carry out of the mantissa adds another, rightly.
  return static_cast<uint16_t>(
      sign | (kept + (static_cast<uint64_t>(exponent < 1 ? 0 : exponent - 1) << kMantissa)));
}

constexpr uint16_t to_bf16(double x) { return narrow<8, 7>(x); }
constexpr uint16_t to_f16(double x) { return narrow<5, 10>(x); }

constexpr float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

constexpr float from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31;
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float x = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -x : x;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace fulgur::io
