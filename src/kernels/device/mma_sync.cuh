// Products of a warp on fragments in registers (mma.sync), and loads of fragments from tiles in shared memory.
#pragma once
#include "device/memory.cuh"
#include "host_device/element.h"

// Whether mma.sync multiplies 16 columns of A at once, and bf16 and tf32: from compute capability 8.0 on. Before it
// multiplies 8 columns of f16.
enum : int { kHasAllProducts = __CUDA_ARCH__ >= 800 };

// C += A B of f16, 16 x 8 by 8 x 8: the first half of the columns of A and of the rows of B below.
__device__ __forceinline__ void multiply_16_8_8(float* c, const u32* a, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// C += A B for numbers that mma.sync does not multiply: a word of A or B has two of bf16 or one of f32. C, A and B lie as
// below. A lane gets the words of its rows from its quad, and those of its columns from the two quads that have them.
template <Element type>
__device__ __forceinline__ void multiply_by_fma(float* c, const u32* a, u32 b0, u32 b1) {
  const u32 lane = lane_of_warp();
  const auto number = [](u32 word, int i) {
    return __uint_as_float(type == kF32 ? word : i == 0 ? word << 16 : word & 0xffff0000);
  };
#pragma unroll 1
  for (u32 q = 0; q < 4; ++q)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 rows[2], columns[2];
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        rows[i] = __shfl_sync(0xffffffff, a[2 * half + i], lane / 4 * 4 + q);
        columns[i] = __shfl_sync(0xffffffff, half == 0 ? b0 : b1, lane % 4 * 8 + 4 * i + q);
      }
#pragma unroll
      for (int i = 0; i < (type == kF32 ? 1 : 2); ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) c[j] = __fmaf_rn(number(rows[j / 2], i), number(columns[j % 2], i), c[j]);
    }
}

// C += A B, 16 x 16 by 16 x 8. C has the layout of fragment.cuh. A: a[0], a[1] are columns 2q, 2q + 1 of rows r and
// r + 8, a[2], a[3] the same 8 columns on. B: b0 is rows 2q, 2q + 1 of column r, b1 the same 8 rows on.
template <Element type>
__device__ __forceinline__ void multiply_16_8_16(float* c, const u32* a, u32 b0, u32 b1) {
  if constexpr (!kHasAllProducts && type == kF16) {
    multiply_16_8_8(c, a, b0);
    return multiply_16_8_8(c, a + 2, b1);
  }
  if constexpr (!kHasAllProducts && type == kBF16) return multiply_by_fma<kBF16>(c, a, b0, b1);
#define FULGUR_MMA_SYNC(TYPE)                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                       \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (type == kBF16) FULGUR_MMA_SYNC("bf16");
  if constexpr (type == kF16) FULGUR_MMA_SYNC("f16");
#undef FULGUR_MMA_SYNC
}

// C = A B, or C += A B, of bf16, 16 x 8 by 8 x 8. A: a[0], a[1] are columns 2q, 2q + 1 of rows r and r + 8. B: b is rows
// 2q, 2q + 1 of column r.
template <bool adds>
__device__ __forceinline__ void multiply_16_8_8_bf16(float* c, const u32* a, u32 b) {
  if constexpr (adds)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.f));
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
