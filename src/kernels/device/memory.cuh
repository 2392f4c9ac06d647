// Loads and stores with PTX qualifiers that C++ does not have; names say which memory they access. Addresses of shared
// memory are 32-bit shared addresses.
#pragma once
#include "device/warp.cuh"

// Loads a word that no kernel writes during this launch. L2 fetches all 128 bytes around it, which other CTAs need.
__device__ __forceinline__ u32 load_global_of_line(const void* at) {
  u32 x;
  asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
}

// Loads from L2, not from L1: for data that another SM wrote during this launch.
__device__ __forceinline__ float load_global_fresh(const float* at) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_global_fresh2(const float* at) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_global_fresh4(const float* at) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}

// Loads a word, or 16 bytes, from L2 if `there`; otherwise they are 0.
__device__ __forceinline__ void load_global_if(bool there, const void* at, u32 (&x)[1]) {
  x[0] = 0;
  asm volatile(
      "{.reg .pred there;\n"
      "setp.ne.u32 there, %2, 0;\n"
      "@there ld.global.cg.u32 %0, [%1];}"
      : "+r"(x[0])
      : "l"(at), "r"(u32(there))
      : "memory");
}
__device__ __forceinline__ void load_global_if(bool there, const void* at, u32 (&x)[4]) {
  x[0] = x[1] = x[2] = x[3] = 0;
  asm volatile(
      "{.reg .pred there;\n"
      "setp.ne.u32 there, %5, 0;\n"
      "@there ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
      : "l"(at), "r"(u32(there))
      : "memory");
}

// Stores data that is not read during this launch: L2 evicts it before other lines.
__device__ __forceinline__ void store_global_streaming16(void* at, const u32 (&x)[4]) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Prefetches to L1.
__device__ __forceinline__ void prefetch_global(const void* at) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(at) : "memory");
}

// Increments a counter, from `last` back to 0. Data that the CTA wrote before its last barrier is visible to CTAs that
// see the count.
__device__ __forceinline__ int take_ticket(int* tickets, int last) {
  int before;
  asm volatile("atom.global.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(tickets), "r"(last) : "memory");
  return before;
}

__device__ __forceinline__ int load_shared(u32 address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ u32 load_shared_u16(u32 address) {
  u32 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ u32 load_shared_u8(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void load_shared_pair(u32 address, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_shared_pair(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, int x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared_u16(u32 address, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(x)) : "memory");
}
__device__ __forceinline__ void store_shared_four(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void store_shared_zero16(u32 address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ void load_shared16(u32 address, u32* x) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
// Loads 1, 2 or 4 words.
template <int words>
__device__ __forceinline__ void load_shared_words(u32 address, u32* x) {
  if constexpr (words == 4) return load_shared16(address, x);
  if constexpr (words == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
    return;
  }
  x[0] = u32(load_shared(address));
}
__device__ __forceinline__ void store_shared16(u32 address, const u32* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Returns 0, computed from a packed pair of non-negative numbers: instructions that depend on it stay after these.
__device__ __forceinline__ u32 zero_after(u32 packed) { return packed >> 31; }

// Stores a struct of ints by 16 bytes.
template <class T>
__device__ __forceinline__ void store_shared_struct(u32 address, const T& value) {
  static_assert(sizeof(T) % 16 == 0);
  const int* x = reinterpret_cast<const int*>(&value);
#pragma unroll
  for (int i = 0; i < sizeof(T) / 4; i += 4)
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address + 4 * i), "r"(x[i]), "r"(x[i + 1]),
                 "r"(x[i + 2]), "r"(x[i + 3])
                 : "memory");
}

// Loads a struct of ints by the first lane, for the whole warp.
template <class T>
__device__ __forceinline__ T load_shared_struct_uniform(u32 address) {
  static_assert(sizeof(T) % 16 == 0);
  T value;
  int* x = reinterpret_cast<int*>(&value);
#pragma unroll
  for (int i = 0; i < sizeof(T) / 4; i += 4) {
    int a = 0, b = 0, c = 0, d = 0;
    asm volatile(
        "{.reg .pred p;\n"
        ".reg .u32 lane;\n"
        "mov.u32 lane, %%laneid;\n"
        "setp.eq.u32 p, lane, 0;\n"
        "@p ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
        : "r"(address + 4 * i)
        : "memory");
    x[i] = uniform(a);
    x[i + 1] = uniform(b);
    x[i + 2] = uniform(c);
    x[i + 3] = uniform(d);
  }
  return value;
}

// Stores four 8 x 8 matrices of 16-bit elements from the fragments of a warp, as rows of 16 bytes (stmatrix): lane i
// has the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_shared_matrices(u32 address, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// Loads four such matrices (ldmatrix).
__device__ __forceinline__ void load_shared_matrices(u32 address, u32* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
