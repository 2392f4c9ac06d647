// The fast functions of the hardware, and conversions between f32 and the input type.
#pragma once
#include "kernel_config.h"
#include "device/elements.cuh"
#include "host_device/host_device.h"

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values rounded to the input type, `low` in the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn." FULGUR_INPUT "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float to_float(unsigned short x) {
  float y;
  asm("cvt.f32." FULGUR_INPUT " %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ constexpr bool kInputIsBF16 = FULGUR_INPUT[0] == 'b';

// The two values of a packed pair.
__device__ __forceinline__ float low_of(u32 packed) { return to_float(static_cast<unsigned short>(packed)); }
__device__ __forceinline__ float high_of(u32 packed) {
  // The compiler would shift it down and up again.
  if (kInputIsBF16) return __uint_as_float(packed & 0xffff0000);
  return to_float(static_cast<unsigned short>(packed >> 16));
}

// The same of f16, whatever the input type is.
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_of_half(u32 packed) { return half_to_float(static_cast<unsigned short>(packed)); }
__device__ __forceinline__ float high_of_half(u32 packed) {
  return half_to_float(static_cast<unsigned short>(packed >> 16));
}

// sum + a * b of packed values of the input type.
__device__ __forceinline__ u32 packed_fma(u32 a, u32 b, u32 sum) {
  asm("fma.rn." FULGUR_INPUT "x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
  return sum;
}
