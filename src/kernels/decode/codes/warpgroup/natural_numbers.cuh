// Conversion of 16 bytes of codes to f16 in the order of their columns, for tiles that wgmma reads.
//
// The bits u of an integer code, with its sign flipped, are the lowest ones of 0x6400 | u, the number 1024 + u, or of
// 0x5400 | u << 4, the number 64 + u: one sum takes away both these and the bias, without rounding. Alone they are the
// subnormal number u 2^-24 or 16 u 2^-24, from which one multiplication and addition makes a number times its scale.
#pragma once
#include "device/codes.cuh"

template <Element type>
struct NaturalNumbers {
  enum : int { kWords = 64 / bits_of(type), kColumns = 2 * kWords, kIntegers = Codes<type>::kIntegers };

  static __device__ __forceinline__ void convert(const u32 (&codes)[4], u32 (&x)[kWords]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (type == kE4M3) {
        x[2 * i] = e4m3_to_f16(codes[i], 0);
        x[2 * i + 1] = e4m3_to_f16(codes[i], 1);
      } else if constexpr (type == kE5M2) {  // the upper half of f16
        x[2 * i] = __byte_perm(codes[i], 0, 0x1404);
        x[2 * i + 1] = __byte_perm(codes[i], 0, 0x3424);
      } else if constexpr (bits_of(type) == 8) {
        const u32 unsigned_codes = codes[i] ^ 0x80808080;
        x[2 * i] = Half::add(__byte_perm(unsigned_codes, 0x64646464, 0x4140), 0xe480e480);
        x[2 * i + 1] = Half::add(__byte_perm(unsigned_codes, 0x64646464, 0x4342), 0xe480e480);
      } else if constexpr (type == kInt4) {  // a byte has two successive columns
#pragma unroll
        for (int byte = 0; byte < 4; ++byte)
          x[4 * i + byte] = number(__byte_perm(codes[i], 0, 0x4040 | byte << 8 | byte), 0x00f0000f, 0x54806408);
      } else {  // q4_0: a byte has two columns that are 16 apart
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 two = __byte_perm(codes[i], 0, half == 0 ? 0x4140 : 0x4342);
          x[2 * i + half] = Half::add(and_xor(two, 0x000f000f, 0x64006400), 0xe408e408);
          x[2 * i + half + 8] = Half::add(and_xor(two, 0x00f000f0, 0x54005400), 0xd480d480);
        }
      }
    }
  }

  // Subnormal numbers of integer codes: u 2^-24, or 16 u 2^-24 of codes in upper halves of bytes.
  static __device__ __forceinline__ void subnormal(const u32 (&codes)[4], u32 (&x)[kWords]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (bits_of(type) == 8) {
        x[2 * i] = __byte_perm(codes[i] ^ 0x80808080, 0, 0x4140);
        x[2 * i + 1] = __byte_perm(codes[i] ^ 0x80808080, 0, 0x4342);
      } else if constexpr (type == kInt4) {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte)
          x[4 * i + byte] = and_xor(__byte_perm(codes[i], 0, 0x4040 | byte << 8 | byte), 0x00f0000f, 0x00800008);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 two = __byte_perm(codes[i], 0, half == 0 ? 0x4140 : 0x4342);
          x[2 * i + half] = two & 0x000f000f;
          x[2 * i + half + 8] = two & 0x00f000f0;
        }
      }
    }
  }
  // What subnormal numbers are multiplied with: two f16 that are equal, over 16 for codes in upper halves of bytes.
  class Times {
   public:
    __device__ __forceinline__ explicit Times(u32 x) : lower_(x), upper_(x) {
      const u32 sixteenth = Half::multiply(x, 0x2c002c00);
      if (type == kInt4) lower_ = __byte_perm(x, sixteenth, 0x7610);
      if (type == kQ4_0) upper_ = sixteenth;
    }
    __device__ __forceinline__ u32 of_word(int i) const { return type == kQ4_0 && i % 16 >= 8 ? upper_ : lower_; }

   private:
    u32 lower_, upper_;
  };

 private:
  // Two codes of 4 bits in two's complement, selected by `mask`; `flipped` has their signs and what makes numbers of
  // them.
  static __device__ __forceinline__ u32 number(u32 codes, u32 mask, u32 flipped) {
    return Half::add(and_xor(codes, mask, flipped), flipped | 0x80008000);
  }
};
