// Products of a warp on fragments in registers (mma.sync), and loads of fragments from tiles in shared memory.
#pragma once
#include "device/memory.cuh"
#include "host_device/element.h"

// C += A B, 16 x 16 by 16 x 8. C has the layout of fragment.cuh. A: a[0], a[1] are columns 2q, 2q + 1 of rows r and
// r + 8, a[2], a[3] the same 8 columns on. B: b0 is rows 2q, 2q + 1 of column r, b1 the same 8 rows on.
template <Element type>
__device__ __forceinline__ void multiply_16_8_16(float* c, const u32* a, u32 b0, u32 b1) {
#define FULGUR_MMA_SYNC(TYPE)                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                       \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (type == kBF16) FULGUR_MMA_SYNC("bf16");
  if constexpr (type == kF16) FULGUR_MMA_SYNC("f16");
#undef FULGUR_MMA_SYNC
}

// C += A B of tf32, 16 x 8 by 8 x 8: the lower 13 bits of a word do not count. A: a[0], a[1] are column q of rows r and
// r + 8, a[2], a[3] the same 4 columns on. B: b[0] is row q of column r, b[1] the same 4 rows on.
__device__ __forceinline__ void multiply_tf32(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Like load_shared_matrices, with each matrix transposed.
__device__ __forceinline__ void load_shared_matrices_transposed(u32 address, u32* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which each lane has two adjacent ones, as in A and B.
__device__ __forceinline__ u32 transposed_matrix(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// The offset of chunk `chunk` of 16 bytes in a row of a panel. The same chunk of eight rows lies in different banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ row) % 8 << 4); }
