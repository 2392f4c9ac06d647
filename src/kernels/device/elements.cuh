// Elements of any type in memory: single ones, words of 32 bits, or vectors of 16 bytes.
#pragma once
#include "host_device/element.h"
#include "host_device/host_device.h"

template <Element kType>
struct InMemory {
  using Type = unsigned short;
};
template <>
struct InMemory<kF32> {
  using Type = float;
};
template <>
struct InMemory<kBool> {
  using Type = unsigned char;
};
template <>
struct InMemory<kE4M3> {
  using Type = unsigned char;
};
template <>
struct InMemory<kE5M2> {
  using Type = unsigned char;
};
template <>
struct InMemory<kInt8> {
  using Type = unsigned char;
};
template <>
struct InMemory<kInt4> {
  using Type = unsigned char;  // two
};
template <>
struct InMemory<kQ8_0> {
  using Type = unsigned char;  // a byte of a block
};
template <>
struct InMemory<kQ4_0> {
  using Type = unsigned char;
};

// N elements that are loaded and stored together, by 16 bytes if they have as many.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T x[N];
};
template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* at) {
  return *reinterpret_cast<const Pack<T, N>*>(at);
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T* at, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(at) = pack;
}

__device__ __forceinline__ float half_to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// Converts two codes of e4m3 to a word of f16, which has each of their numbers.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 e4m3_to_f16(unsigned short codes) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

// Converts the codes in a half of a word: the instruction can read the upper half, which saves a shift.
__device__ __forceinline__ u32 e4m3_to_f16(u32 codes, int half) {
  if (half == 0) return e4m3_to_f16(static_cast<unsigned short>(codes));
  u32 halves;
  asm("{.reg .b16 high;\n"
      "mov.b32 {_, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;}"
      : "=r"(halves)
      : "r"(codes));
  return halves;
}
#else
// Without an instruction for it: exponent and mantissa of a code are those of f16 for its number over 2^8. The code of
// NaN comes out as 480, the only one of which the multiple by 146 is infinite, and infinity times 0 is NaN.
__device__ __forceinline__ u32 e4m3_to_f16(u32 codes, int half) {
  constexpr u32 k256 = 0x5c005c00, k146 = 0x58905890;
  const u32 spread = __byte_perm(codes, 0, half == 0 ? 0x1404 : 0x3424);  // a code in the upper byte of each half
  const u32 scaled = (spread & 0x80008000) | (spread >> 1 & 0x3f803f80);
  u32 number, large;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(number) : "r"(scaled), "r"(k256));
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(large) : "r"(number), "r"(k146));
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(number) : "r"(large), "r"(0));
  return number;
}
__device__ __forceinline__ u32 e4m3_to_f16(unsigned short codes) { return e4m3_to_f16(u32(codes), 0); }
#endif

// Converts two words of f16 to e4m3, rounded to nearest, at most 448; `low` is in the lower half.
__device__ __forceinline__ u32 f16_to_e4m3(u32 low, u32 high) {
  u32 codes;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(codes)
      : "r"(low), "r"(high));
  return codes;
}

// Converts four numbers to e4m3; `a` is in the lowest byte.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  u32 codes;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

template <Element kType>
__device__ __forceinline__ float to_f32(typename InMemory<kType>::Type x) {
  if constexpr (kType == kF32) {
    return x;
  } else if constexpr (kType == kBF16) {
    return __uint_as_float(u32(x) << 16);
  } else if constexpr (kType == kE4M3) {
    return half_to_float(static_cast<unsigned short>(e4m3_to_f16(x)));
  } else if constexpr (kType == kE5M2) {
    return half_to_float(static_cast<unsigned short>(x << 8));
  } else {
    return half_to_float(x);
  }
}

// Two numbers rounded to bf16, to nearest, ties to even; `low` is in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  if constexpr (__CUDA_ARCH__ >= 800) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  // Without an instruction for it: what is added carries to the upper half where that is rounded up. NaN becomes the
  // one that the instruction makes.
  const auto rounded = [](float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fffffff : bits + 0x7fff + (bits >> 16 & 1);
  };
  return __byte_perm(rounded(low), rounded(high), 0x7632);
}

// The same of f16.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  if constexpr (__CUDA_ARCH__ >= 800)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.f16.f32 low, %1;\n"
        "cvt.rn.f16.f32 high, %2;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(packed)
        : "f"(low), "f"(high));
  return packed;
}

// Rounds to nearest, ties to even.
template <Element kType>
__device__ __forceinline__ typename InMemory<kType>::Type from_f32(float x) {
  if constexpr (kType == kF32) {
    return x;
  } else {
    unsigned short y;
    if constexpr (kType == kBF16) y = static_cast<unsigned short>(pack_bf16(x, 0));
    if constexpr (kType == kF16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
}

// Element i of an array whose type is a run-time argument.
__device__ __forceinline__ float element_at(const void* data, Element type, int i) {
  if (type == kF32) return static_cast<const float*>(data)[i];
  const unsigned short x = static_cast<const unsigned short*>(data)[i];
  return type == kBF16 ? to_f32<kBF16>(x) : to_f32<kF16>(x);
}
__device__ __forceinline__ void set_element(void* data, Element type, int i, float x) {
  if (type == kF32)
    static_cast<float*>(data)[i] = x;
  else
    static_cast<unsigned short*>(data)[i] = type == kBF16 ? from_f32<kBF16>(x) : from_f32<kF16>(x);
}

// A type of elements: columns of a panel and of a step of a product, and operations on words of two elements.
template <Element type>
struct ElementType {
  using Memory = typename InMemory<type>::Type;
  static constexpr Element kType = type;
  enum : int { kBytes = bytes_of(type), kPanelColumns = panel_columns(type), kStep = k_step(type) };

  static __device__ __forceinline__ float to_float(Memory x) { return to_f32<type>(x); }

  // Two values rounded, `low` in the lower half.
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    if constexpr (type == kBF16) packed = pack_bf16(low, high);
    if constexpr (type == kF16) packed = pack_f16(low, high);
    return packed;
  }
  static __device__ __forceinline__ float low(u32 packed) { return to_f32<type>(static_cast<Memory>(packed)); }
  static __device__ __forceinline__ float high(u32 packed) {
    // From a shifted value the compiler would shift back.
    if constexpr (type == kBF16) return __uint_as_float(packed & 0xffff0000);
    return to_f32<type>(static_cast<Memory>(packed >> 16));
  }
  // sum + a * b for words of two.
  static __device__ __forceinline__ u32 fma(u32 a, u32 b, u32 sum) {
    u32 result = 0;
    if constexpr (type == kBF16 && __CUDA_ARCH__ < 800)
      return pack(__fmaf_rn(low(a), low(b), low(sum)), __fmaf_rn(high(a), high(b), high(sum)));
    if constexpr (type == kBF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    if constexpr (type == kF16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
  }
  // The sum of words of two, rounded.
  static __device__ __forceinline__ u32 add(u32 a, u32 b) {
    u32 sum = 0;
    if constexpr (type == kBF16) asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    if constexpr (type == kF16) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
  }
  static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 product = 0;
    if constexpr (type == kF16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }
  // Whether the lower half of a word is neither NaN nor infinite.
  static __device__ __forceinline__ bool is_finite(u32 packed) {
    constexpr u32 kExponent = type == kBF16 ? 0x7f80 : 0x7c00;
    return (packed & kExponent) != kExponent;
  }
};

using Half = ElementType<kF16>;
