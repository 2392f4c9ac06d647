// Elements of any type that memory holds, for kernels that are not of one input type: alone, or as many as 16 bytes
// hold.
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

// N elements that are loaded and stored at once, 16 bytes at a time where they are as many.
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

template <Element kType>
__device__ __forceinline__ float to_f32(typename InMemory<kType>::Type x) {
  if constexpr (kType == kF32) {
    return x;
  } else if constexpr (kType == kBF16) {
    return __uint_as_float(u32(x) << 16);
  } else {
    return half_to_float(x);
  }
}

// Rounded to nearest, ties to even.
template <Element kType>
__device__ __forceinline__ typename InMemory<kType>::Type from_f32(float x) {
  if constexpr (kType == kF32) {
    return x;
  } else {
    unsigned short y;
    if constexpr (kType == kBF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    if constexpr (kType == kF16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
}
