// Approximate functions of the hardware.
#pragma once
#include "host_device/host_device.h"

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The factor that scales f32 numbers, the largest of which has the bits `largest`, to 64-bit integers, of which
// 2^log_count can be added without overflow.
__device__ __forceinline__ double unit_of(int largest, int log_count) {
  const int exponent = (largest >> 23) - 126;
  return __longlong_as_double((long long)(1023 + 62 - log_count - exponent) << 52);
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
  if constexpr (__CUDA_ARCH__ < 800) return a != a || b != b ? a + b : fminf(a, b);
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
  if constexpr (__CUDA_ARCH__ < 800) return a != a || b != b ? a + b : fmaxf(a, b);
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The larger ones of two pairs of bf16; NaN where either is NaN.
__device__ __forceinline__ u32 max_of_bf16_pairs(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// All bits of a half are 1 where a number of one pair of bf16 is less than that of the other.
__device__ __forceinline__ u32 less_bf16_pairs(u32 a, u32 b) {
  u32 y;
  asm("set.lt.u32.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

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
