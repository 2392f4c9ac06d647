// Warpgroup matrix products: D[64, N] += A[64, 16] B[16, N], D in fp32 registers, A in registers or shared memory, B in
// shared memory; of 8-bit elements k is 32. An operand in shared memory lies along k (Q and K: k runs along its rows of
// 128 bytes) or across (V: k counts them). One line per N at the end; N is the count of columns, N / 2 the registers a
// thread holds.
#pragma once
#include "host_device/element.h"
#include "sm90/ptx/mbarrier.cuh"

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Low word of the matrix descriptor of a 128-byte-swizzled operand; the high word is the same for all (1024 bytes
// between groups of 8 rows). `leading_bytes` lie between panels of 64 columns of an operand that lies across; one that
// lies along k ignores it. To advance by x bytes add x >> 4.
__device__ __forceinline__ u32 operand_descriptor(u32 shared, u32 leading_bytes) {
  return (leading_bytes >> 4) << 16 | (shared & 0x3ffff) >> 4;
}
#define FULGUR_DESCRIPTOR_HIGH "0x40000040"
// The same of one in steps: rows of 32 bytes, 256 bytes between groups of 8 of them.
#define FULGUR_STEP_DESCRIPTOR_HIGH "0xc0000010"

// How an operand lies in shared memory: of the first two, the instruction's transpose bit. kInSteps: along k, in rows
// of one step, swizzled likewise.
enum Lies : int { kAlongK = 0, kAcrossK = 1, kInSteps };

// Both operands are of one type of 16 bits; or A is of e4m3, and B of this type.
template <int N, Element type>
struct Wgmma;

// The text of N / 2 accumulators and their operands, eight at a time.
#define FULGUR_T8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FULGUR_T16 FULGUR_T8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define FULGUR_T24 FULGUR_T16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define FULGUR_T32 FULGUR_T24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define FULGUR_T40 FULGUR_T32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define FULGUR_T48 FULGUR_T40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define FULGUR_T56 FULGUR_T48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define FULGUR_T64 FULGUR_T56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define FULGUR_T72 FULGUR_T64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define FULGUR_T80 FULGUR_T72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define FULGUR_T88 FULGUR_T80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define FULGUR_T96 FULGUR_T88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define FULGUR_T104 FULGUR_T96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define FULGUR_T112 FULGUR_T104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define FULGUR_T120 FULGUR_T112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define FULGUR_T128 FULGUR_T120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define FULGUR_O4(b) "+f"(D[b]), "+f"(D[b + 1]), "+f"(D[b + 2]), "+f"(D[b + 3])
#define FULGUR_O(b) FULGUR_O4(b), FULGUR_O4(b + 4)
#define FULGUR_O8 FULGUR_O(0)
#define FULGUR_O16 FULGUR_O8, FULGUR_O(8)
#define FULGUR_O24 FULGUR_O16, FULGUR_O(16)
#define FULGUR_O32 FULGUR_O24, FULGUR_O(24)
#define FULGUR_O40 FULGUR_O32, FULGUR_O(32)
#define FULGUR_O48 FULGUR_O40, FULGUR_O(40)
#define FULGUR_O56 FULGUR_O48, FULGUR_O(48)
#define FULGUR_O64 FULGUR_O56, FULGUR_O(56)
#define FULGUR_O72 FULGUR_O64, FULGUR_O(64)
#define FULGUR_O80 FULGUR_O72, FULGUR_O(72)
#define FULGUR_O88 FULGUR_O80, FULGUR_O(80)
#define FULGUR_O96 FULGUR_O88, FULGUR_O(88)
#define FULGUR_O104 FULGUR_O96, FULGUR_O(96)
#define FULGUR_O112 FULGUR_O104, FULGUR_O(104)
#define FULGUR_O120 FULGUR_O112, FULGUR_O(112)
#define FULGUR_O128 FULGUR_O120, FULGUR_O(120)

#define FULGUR_MMA(N, TYPE) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {"
#define FULGUR_MMA_OF_8_BITS(N, TYPE) "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3." TYPE " {"
// R = N / 2 accumulators; a to g: the numbers of the operands after them. `keep` = 0 starts the sum from zero.
#define FULGUR_WGMMA_OF(ELEMENT, TYPE, N, R, a, b, c, d, e, f, g)                                                      \
  template <>                                                                                                          \
  struct Wgmma<N, ELEMENT> {                                                                                           \
    /* A in shared memory. */                                                                                          \
    template <Lies A_lies, Lies B_lies>                                                                                \
    static __device__ __forceinline__ void multiply(float (&D)[R], u32 A, u32 B, int keep) {                           \
      asm volatile("{.reg .pred keep; .reg .b64 A, B; setp.ne.b32 keep, %" #c ", 0;\n"                                 \
                   "mov.b64 A, {%" #a ", " FULGUR_DESCRIPTOR_HIGH "};\n"                                               \
                   "mov.b64 B, {%" #b ", " FULGUR_DESCRIPTOR_HIGH "};\n"                                               \
                   FULGUR_MMA(N, TYPE) FULGUR_T##R "}, A, B, keep, 1, 1, %" #d ", %" #e ";}"                           \
                   : FULGUR_O##R                                                                                       \
                   : "r"(A), "r"(B), "r"(keep), "n"(+A_lies), "n"(+B_lies));                                           \
    }                                                                                                                  \
    /* A in registers, as the accumulators of a product hold it once they are packed in pairs. */                      \
    template <Lies B_lies>                                                                                             \
    static __device__ __forceinline__ void multiply(float (&D)[R], const u32* A, u32 B, int keep) {                    \
      asm volatile("{.reg .pred keep; .reg .b64 B; setp.ne.b32 keep, %" #f ", 0;\n"                                    \
                   "mov.b64 B, {%" #e ", " FULGUR_DESCRIPTOR_HIGH "};\n"                                               \
                   FULGUR_MMA(N, TYPE) FULGUR_T##R "}, {%" #a ", %" #b ", %" #c ", %" #d "}, B, keep, 1, 1, %" #g ";}" \
                   : FULGUR_O##R                                                                                       \
                   : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B), "r"(keep), "n"(+B_lies));                     \
    }                                                                                                                  \
  };
// A of e4m3 and B of 8 bits lie along k, B with A in registers in steps.
#define FULGUR_WGMMA_OF_8_BITS(ELEMENT, TYPE, N, R, a, b, c, d, e, f, g)                                               \
  template <>                                                                                                          \
  struct Wgmma<N, ELEMENT> {                                                                                           \
    template <Lies A_lies, Lies B_lies>                                                                                \
    static __device__ __forceinline__ void multiply(float (&D)[R], u32 A, u32 B, int keep) {                           \
      static_assert(A_lies == kAlongK && B_lies == kAlongK);                                                           \
      asm volatile("{.reg .pred keep; .reg .b64 A, B; setp.ne.b32 keep, %" #c ", 0;\n"                                 \
                   "mov.b64 A, {%" #a ", " FULGUR_DESCRIPTOR_HIGH "};\n"                                               \
                   "mov.b64 B, {%" #b ", " FULGUR_DESCRIPTOR_HIGH "};\n"                                               \
                   FULGUR_MMA_OF_8_BITS(N, TYPE) FULGUR_T##R "}, A, B, keep, 1, 1;}"                                   \
                   : FULGUR_O##R                                                                                       \
                   : "r"(A), "r"(B), "r"(keep));                                                                       \
    }                                                                                                                  \
    template <Lies B_lies>                                                                                             \
    static __device__ __forceinline__ void multiply(float (&D)[R], const u32* A, u32 B, int keep) {                    \
      static_assert(B_lies == kInSteps);                                                                               \
      asm volatile("{.reg .pred keep; .reg .b64 B; setp.ne.b32 keep, %" #f ", 0;\n"                                    \
                   "mov.b64 B, {%" #e ", " FULGUR_STEP_DESCRIPTOR_HIGH "};\n"                                          \
                   FULGUR_MMA_OF_8_BITS(N, TYPE) FULGUR_T##R                                                           \
                   "}, {%" #a ", %" #b ", %" #c ", %" #d "}, B, keep, 1, 1;}"                                          \
                   : FULGUR_O##R                                                                                       \
                   : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(B), "r"(keep));                                   \
    }                                                                                                                  \
  };
#define FULGUR_WGMMA(N, R, ...)                            \
  FULGUR_WGMMA_OF(kBF16, "bf16", N, R, __VA_ARGS__)        \
  FULGUR_WGMMA_OF(kF16, "f16", N, R, __VA_ARGS__)          \
  FULGUR_WGMMA_OF_8_BITS(kE4M3, "e4m3", N, R, __VA_ARGS__) \
  FULGUR_WGMMA_OF_8_BITS(kE5M2, "e5m2", N, R, __VA_ARGS__)
FULGUR_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
FULGUR_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
FULGUR_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
FULGUR_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FULGUR_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FULGUR_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FULGUR_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
FULGUR_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FULGUR_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
FULGUR_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
FULGUR_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
FULGUR_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FULGUR_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
FULGUR_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
FULGUR_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
FULGUR_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
