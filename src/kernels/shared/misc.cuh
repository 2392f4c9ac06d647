// Small instructions: registers, barriers of named groups, exponentials, packing, matrix stores.
#pragma once
#include "shared/mbarrier.cuh"

template <int registers>
__device__ __forceinline__ void registers_raise() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers)); }
template <int registers>
__device__ __forceinline__ void registers_drop() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers)); }

// Non-zero in exactly one lane of a converged warp.
__device__ __forceinline__ u32 elect_one() {
  u32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}

// One value for the whole warp; tells the compiler so, and what is computed from it lives in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

__device__ __forceinline__ void named_barrier_sync(u32 name, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
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

// Past the first-level cache: data that another multiprocessor wrote during this launch.
__device__ __forceinline__ float load_shared_by_all(const float* at) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_matrix_x4(u32 shared, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void shared_store4(u32 shared, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Read by the first lane, for the whole warp.
__device__ __forceinline__ void shared_load4_uniform(u32 shared, int& a, int& b, int& c, int& d) {
  a = b = c = d = 0;
  asm volatile("{.reg .pred p; .reg .u32 lane; mov.u32 lane, %%laneid; setp.eq.u32 p, lane, 0; @p ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
               : "r"(shared)
               : "memory");
  a = uniform(a), b = uniform(b), c = uniform(c), d = uniform(d);
}

__device__ __forceinline__ void shared_store_zero16(u32 shared) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}
