#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "base/convert.h"
#include "fulgur/tensor.h"

namespace fulgur {

// The low-bit formats. Codes lie in blocks; number i of a block is scale * code(block, i) + low. A
// format whose scales lie in a tensor of their own has, besides code, its put, which rounds a
// number to a code, to nearest and ties to even, and saturates to [kLowest, kLargest]. A format
// with scales in its blocks has scale, low (0 where there is none) and pack, which makes a block of
// numbers. A format is a Format, a line of FULGUR_FORMATS, and its vectors (simd/formats-inl.h).

/// Calls F(name) for each format, in the order of DType.
#define FULGUR_FORMATS(F) \
  F(E4M3)                 \
  F(E5M2)                 \
  F(Int8)                 \
  F(Int4)                 \
  F(Q8_0)                 \
  F(Q4_0)                 \
  F(Q4_1)                 \
  F(Q5_0)                 \
  F(Q5_1)                 \
  F(IQ4_NL)

template <DType>
struct Format;

/// A block of codes without a scale: `bits` each.
template <int bits>
struct Codes {
  static constexpr bool kScaled = false;  ///< by what lies in the block
  static constexpr int kBits = bits;
  static constexpr int kBlock = bits == 4 ? 2 : 1, kBytes = 1;
};

/// Floats of 8 bits with `fraction` bits of fraction. Their largest number has the code `largest`,
/// and what is larger becomes it; code 0x7f is NaN.
template <int fraction, int largest>
struct Float8 : Codes<8> {
  static constexpr int kBias = (1 << (6 - fraction)) - 1;

  static float code(const uint8_t* block, int i) {
    const uint32_t magnitude = block[i] & 0x7fu, sign = (block[i] & 0x80u) << 24;
    const float value = std::bit_cast<float>(magnitude << (23 - fraction)) *
                        std::bit_cast<float>(uint32_t{254 - kBias} << 23);
    const uint32_t special = magnitude <= largest  ? 0
                             : magnitude == kInfty ? 0x7f800000u
                                                   : 0x7fc00000u;
    return std::bit_cast<float>(sign | special | std::bit_cast<uint32_t>(value));
  }
  static void put(uint8_t* block, int i, float x) {
    const uint32_t sign = std::signbit(x) ? 0x80 : 0;
    const float magnitude = std::fabs(x);
    uint32_t bits = 0x7f;
    if (!std::isnan(x)) {
      // In units of the last place; a carry into the exponent comes out right by itself.
      const int field = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23);
      const int exponent = std::clamp(field - 127, 1 - kBias, 127);
      const auto power = static_cast<uint32_t>(127 + fraction - exponent);
      const float units = std::rint(magnitude * std::bit_cast<float>(power << 23));
      const int base = (exponent + kBias - 1) << fraction;
      bits = units >= 256 || base > largest
                 ? largest
                 : std::min<uint32_t>(largest, base + static_cast<uint32_t>(units));
    }
    block[i] = static_cast<uint8_t>(sign | bits);
  }

 private:
  static constexpr uint32_t kInfty = largest == 0x7b ? 0x7c : 0x100;  // e4m3 has none
};

/// Two's complement, the first code in the lowest bits.
template <int bits>
struct Integers : Codes<bits> {
  static constexpr float kLargest = (1 << (bits - 1)) - 1, kLowest = -kLargest - 1;

  static float code(const uint8_t* block, int i) {
    if constexpr (bits == 8) return static_cast<int8_t>(block[i]);
    return static_cast<float>(static_cast<int8_t>(block[0] << (4 - 4 * i)) >> 4);
  }
  static void put(uint8_t* block, int i, float x) {
    const float rounded = std::isnan(x) ? 0 : std::clamp(std::rint(x), kLowest, kLargest);
    const auto value = static_cast<uint8_t>(static_cast<int>(rounded));
    if constexpr (bits == 8) {
      block[i] = value;
    } else {
      block[0] = static_cast<uint8_t>((block[0] & (i == 0 ? 0xf0 : 0x0f)) | (value & 15) << 4 * i);
    }
  }
};

template <>
struct Format<DType::kE4M3> : Float8<3, 0x7e> {
  static constexpr const char* kName = "e4m3";
  static constexpr float kLargest = 448, kLowest = -448;
};
template <>
struct Format<DType::kE5M2> : Float8<2, 0x7b> {
  static constexpr const char* kName = "e5m2";
  static constexpr float kLargest = 57344, kLowest = -57344;
};
template <>
struct Format<DType::kInt8> : Integers<8> {
  static constexpr const char* kName = "int8";
};
template <>
struct Format<DType::kInt4> : Integers<4> {
  static constexpr const char* kName = "int4";
};

/// The extremes of the finite numbers of a block, from which its scale follows.
struct Extremes {
  float largest = 0;  ///< by magnitude, with its sign; the first of equal ones
  float min = std::numeric_limits<float>::max(), max = -min;  ///< of no number: min > max
  bool nan = false;

  Extremes(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) add(x[i]);
  }
  Extremes() = default;
  void add(float x) {
    nan |= std::isnan(x);
    if (!std::isfinite(x)) return;
    if (std::fabs(x) > std::fabs(largest)) largest = x;
    min = std::min(min, x);
    max = std::max(max, x);
  }
  void add(const Extremes& other) {
    if (std::fabs(other.largest) > std::fabs(largest)) largest = other.largest;
    min = std::min(min, other.min);
    max = std::max(max, other.max);
    nan |= other.nan;
  }
};

/// Clamps a number to the range of f16; NaN stays.
inline float in_f16(float x) { return std::isnan(x) ? x : std::clamp(x, -65504.0f, 65504.0f); }

/// 1 / scale; 0 if that is not finite, which makes all codes that of 0.
inline float inverse_of(float scale) {
  const float inverse = 1 / scale;
  return std::isfinite(inverse) ? inverse : 0;
}

/// ggml's blocks of 32 numbers: the scale in f16, with `has_low` the number of code 0 in f16, with
/// 5 bits the highest of each code, then the lower 4: those of number i in the lower half of byte
/// i, of number 16 + i in its upper half; or all 8.
template <int bits, bool has_low>
struct GgmlBlock {
  static constexpr bool kScaled = true;
  static constexpr int kBits = bits, kBlock = 32;
  static constexpr int kHigh = has_low ? 4 : 2, kCodes = kHigh + (bits == 5 ? 4 : 0);
  static constexpr int kBytes = kCodes + (bits == 8 ? 32 : 16);

  static float scale(const uint8_t* block) { return half(block); }
  static float low(const uint8_t* block) { return has_low ? half(block + 2) : 0; }
  /// The bits of code i as an unsigned number.
  static int raw(const uint8_t* block, int i) {
    if constexpr (bits == 8) return block[kCodes + i];
    const int lower = block[kCodes + i % 16] >> (i / 16 * 4) & 15;
    if constexpr (bits == 4) return lower;
    return lower | (block[kHigh + i / 8] >> (i % 8) & 1) << 4;
  }
  static void put_raw(uint8_t* block, int i, int code) {
    if constexpr (bits == 8) {
      block[kCodes + i] = static_cast<uint8_t>(code);
      return;
    }
    block[kCodes + i % 16] |= static_cast<uint8_t>((code & 15) << (i / 16 * 4));
    if constexpr (bits == 5) block[kHigh + i / 8] |= static_cast<uint8_t>(code >> 4 << (i % 8));
  }
  /// The beginning of a block whose codes are 0.
  static void start(uint8_t* block, float scale, float low) {
    std::fill_n(block, kBytes, uint8_t{0});
    put_half(block, scale);
    if (has_low) put_half(block + 2, low);
  }

 private:
  static float half(const uint8_t* at) {
    uint16_t bits16;
    std::memcpy(&bits16, at, sizeof bits16);
    return f32_from_f16(bits16);
  }
  static void put_half(uint8_t* at, float x) {
    const uint16_t bits16 = f16_from_f32(x);
    std::memcpy(at, &bits16, sizeof bits16);
  }
};

/// A format of codes from -2^(bits - 1) on. The number of largest magnitude becomes the lowest
/// code; with 8 bits, in two's complement, it becomes -127 or 127.
template <int bits>
struct GgmlSymmetric : GgmlBlock<bits, false> {
  using Block = GgmlBlock<bits, false>;
  static constexpr int kHalf = bits == 8 ? 0 : 1 << (bits - 1);

  static float code(const uint8_t* block, int i) {
    const int raw = Block::raw(block, i);
    return static_cast<float>(bits == 8 ? static_cast<int8_t>(raw) : raw - kHalf);
  }
  static void pack(const float* x, uint8_t* block) {
    const Extremes e(x, Block::kBlock);
    const float scale = in_f16(e.nan       ? std::numeric_limits<float>::quiet_NaN()
                               : bits == 8 ? std::fabs(e.largest) / 127
                                           : e.largest / -kHalf);
    Block::start(block, scale, 0);
    const float inverse = inverse_of(scale);
    for (int i = 0; i < Block::kBlock; ++i) {
      const float moved = inverse == 0 ? 0 : std::rint(x[i] * inverse);
      const float max = bits == 8 ? 127 : kHalf - 1;
      Block::put_raw(block, i,
                     kHalf + static_cast<int>(std::clamp(moved, bits == 8 ? -max : -kHalf, max)));
    }
  }
};

/// A format whose codes divide the range from the smallest number, code 0, to the largest.
template <int bits>
struct GgmlRange : GgmlBlock<bits, true> {
  using Block = GgmlBlock<bits, true>;

  static float code(const uint8_t* block, int i) {
    return static_cast<float>(Block::raw(block, i));
  }
  static void pack(const float* x, uint8_t* block) {
    constexpr float kMost = (1 << bits) - 1;
    Extremes e(x, Block::kBlock);
    if (e.min > e.max) e.min = e.max = 0;
    const float low = in_f16(e.min);
    const float scale =
        in_f16(e.nan ? std::numeric_limits<float>::quiet_NaN() : (e.max - e.min) / kMost);
    Block::start(block, scale, low);
    const float inverse = inverse_of(scale);
    for (int i = 0; i < Block::kBlock; ++i) {
      const float moved = inverse == 0 ? 0 : std::rint((x[i] - e.min) * inverse);
      Block::put_raw(block, i, static_cast<int>(std::clamp(moved, 0.0f, kMost)));
    }
  }
};

template <>
struct Format<DType::kQ8_0> : GgmlSymmetric<8> {
  static constexpr const char* kName = "q8_0";
};
template <>
struct Format<DType::kQ4_0> : GgmlSymmetric<4> {
  static constexpr const char* kName = "q4_0";
};
template <>
struct Format<DType::kQ4_1> : GgmlRange<4> {
  static constexpr const char* kName = "q4_1";
};
template <>
struct Format<DType::kQ5_0> : GgmlSymmetric<5> {
  static constexpr const char* kName = "q5_0";
};
template <>
struct Format<DType::kQ5_1> : GgmlRange<5> {
  static constexpr const char* kName = "q5_1";
};

/// Codes are indices into a table of numbers that are denser around 0.
template <>
struct Format<DType::kIQ4_NL> : GgmlBlock<4, false> {
  static constexpr const char* kName = "iq4_nl";
  static constexpr std::array<int8_t, 16> kNumbers = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};

  static float code(const uint8_t* block, int i) { return kNumbers[raw(block, i)]; }
  static void pack(const float* x, uint8_t* block) {
    const Extremes e(x, kBlock);
    const float scale =
        in_f16(e.nan ? std::numeric_limits<float>::quiet_NaN() : e.largest / kNumbers[0]);
    start(block, scale, 0);
    const float inverse = inverse_of(scale);
    for (int i = 0; i < kBlock; ++i) {
      const float moved = inverse == 0 ? 0 : x[i] * inverse;
      int best = 0;
      for (int n = 1; n < 16; ++n) {
        if (std::fabs(moved - kNumbers[n]) < std::fabs(moved - kNumbers[best])) best = n;
      }
      put_raw(block, i, moved < kNumbers[0] ? 0 : moved > kNumbers[15] ? 15 : best);
    }
  }
};

/// A row of the table of formats.
struct FormatRow {
  DType dtype;
  const char* name;
  int bits, block, bytes;
  bool scaled;            ///< whether its blocks have scales in f16; if not, a tensor has them
  bool integers;          ///< whether codes are integers, which may have a zero point
  float lowest, largest;  ///< the extreme codes as numbers, where blocks have no scales
  /// Number i of an array of codes, without a scale that lies in a tensor.
  float (*number)(const void* codes, int64_t i);
  /// Convert n codes to numbers, and n numbers to codes; n is a multiple of the block. Where blocks
  /// have no scales, x is in units of the scale.
  void (*unpack)(const void* codes, int64_t n, float* x);
  void (*pack)(const float* x, int64_t n, void* codes);
};

/// The row of a dtype; null if the dtype is no low-bit format.
const FormatRow* format_of(DType dtype);
/// All rows of the table.
std::span<const FormatRow> formats();
/// The row of this name, or null.
const FormatRow* find_format(const char* name);

}  // namespace fulgur
