// Conversion of low-bit codes (base/formats.h) to f16, which represents the number of every code exactly, for tensor
// cores.
#pragma once
#include "device/elements.cuh"

// (x & mask) ^ flipped in one instruction. The compiler makes two of it where both operands are constants.
__device__ __forceinline__ u32 and_xor(u32 x, u32 mask, u32 flipped) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(flipped));
  return y;
}

// A word of 32 bits has kCodesPerHalf codes in each half. numbers() converts it to words of two f16: x[j] is the j-th
// code of the lower half and the j-th code of the upper half. Integers become subnormal numbers of f16 whose bits are
// those of code + kBias, that is, (code + kBias) / scale(j). Elements of 16 bits are not converted.
template <Element type>
struct Codes {
  enum : int {
    kCodesPerHalf = max_of(16 / bits_of(type), 1),
    kIntegers = type == kInt8 || type == kQ8_0 || (is_code(type) && bits_of(type) == 4),
    kBias = kIntegers ? 1 << (bits_of(type) - 1) : 0,
  };
  using Number = ElementType<is_code(type) ? kF16 : type>;

  // The place of a column in 16 bytes of codes: the word, its half, and the index of the code in that half.
  struct Place {
    int word, half, number;
  };
  static __device__ __forceinline__ Place place(int column) {
    if (type == kQ4_0) return {column % 16 / 4, column / 2 % 2, column % 2 * 2 + column / 16};
    return {column / (2 * kCodesPerHalf), column / kCodesPerHalf % 2, column % kCodesPerHalf};
  }
  // The column of code `number` of half a word. `half` counts halves over all words.
  static __device__ __forceinline__ int column_of(int half, int number) {
    return type == kQ4_0 ? 2 * half + number / 2 + number % 2 * 16 : half * kCodesPerHalf + number;
  }

  static __device__ __forceinline__ void numbers(u32 word, u32 (&x)[kCodesPerHalf]) {
    if constexpr (type == kE4M3) {
      const u32 codes = __byte_perm(word, 0, 0x3120);
      x[0] = e4m3_to_f16(codes, 0);
      x[1] = e4m3_to_f16(codes, 1);
    } else if constexpr (type == kE5M2) {  // the upper half of f16
      x[0] = __byte_perm(word, 0, 0x2404);
      x[1] = __byte_perm(word, 0, 0x3414);
    } else if constexpr (kIntegers && kCodesPerHalf == 2) {
      x[0] = and_xor(word, 0x00ff00ff, 0x00800080);
      x[1] = and_xor(word >> 8, 0x00ff00ff, 0x00800080);
    } else if constexpr (kIntegers) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        x[i] = and_xor(word >> 4 * i, 0x000f000f, kSigns);
        x[i + 1] = and_xor(word >> 4 * i, 0x00f000f0, kSigns << 4);
      }
    } else {
      x[0] = word;
    }
  }

  // The sign bits of 4-bit codes in two's complement. Flipping them makes code + kBias.
  static constexpr u32 kSigns = type == kInt4 ? 0x00080008 : 0;

  // The number of bits below code j in its half of a word; the factor that makes code + kBias of a number in x[j]; and
  // a word of two f16 which have in x[j] the meaning of -kBias.
  static __device__ constexpr int bits_below(int j) { return kCodesPerHalf == 4 ? j % 2 * 4 : 0; }
  static __device__ constexpr float scale(int j) { return kIntegers ? 0x1p24f / (1 << bits_below(j)) : 1; }
  static __device__ constexpr u32 minus_bias(int j) { return (0x8000u | kBias << bits_below(j)) * 0x10001u; }

  // Whether all codes of a word are finite. Only formats of floats have codes that are not.
  static __device__ __forceinline__ bool is_finite(u32 word) {
    if constexpr (type == kE4M3) {
      const u32 magnitude = word & 0x7f7f7f7f;  // only 0x7f, which is NaN, carries into the highest bit
      return ((magnitude + 0x01010101) & 0x80808080) == 0;
    } else if constexpr (type == kE5M2) {
      const u32 exponent = word & 0x7c7c7c7c;
      return ((exponent + 0x04040404) & 0x80808080) == 0;
    } else {
      return is_code(type) || (Number::is_finite(word) && Number::is_finite(word >> 16));
    }
  }
  // The word with 0 instead of codes that are not finite.
  static __device__ __forceinline__ u32 finite(u32 word) {
    constexpr int kBits = max_of(bits_of(type), 8);
    u32 kept = 0;
#pragma unroll
    for (int i = 0; i < 32; i += kBits) {
      const u32 of_code = word & ((1u << kBits) - 1) << i;
      if (is_finite(of_code)) kept |= of_code;
    }
    return kept;
  }
};

enum : int { kLoadedCodes = 8 };  // number of codes that load_codes() loads

// Loads codes of one byte, of a row from `from` on, at a distance of `stride` bytes. `count` codes exist; the others
// become 0. `aligned`: the codes are contiguous and aligned to 8 bytes.
__device__ __forceinline__ uint2 load_codes(const unsigned char* from, int count, long long stride, bool aligned) {
  if (aligned && count >= kLoadedCodes) return *reinterpret_cast<const uint2*>(from);
  u32 x[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kLoadedCodes; ++i)
    if (i < count) x[i / 4] |= u32(from[i * stride]) << i % 4 * 8;
  return {x[0], x[1]};
}

// Two of the eight codes of e4m3 or e5m2 that load_codes() has loaded, as f16. `pair`: 0 to 3.
template <Element type>
__device__ __forceinline__ u32 code_pair(uint2 codes, int pair) {
  const u32 word = pair < 2 ? codes.x : codes.y;
  if constexpr (type == kE5M2) return __byte_perm(word, 0, pair % 2 == 0 ? 0x1404 : 0x3424);
  return e4m3_to_f16(word, pair % 2);
}
