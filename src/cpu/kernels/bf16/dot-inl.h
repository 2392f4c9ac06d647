// The matrix product of bf16 by dot products of pairs in vectors (AVX512-BF16), with the operands
// of amx-inl.h: 32 bits of a row of A, which are a pair, are multiplied by 16 pairs of B.
#if defined(FULGUR_CPU_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_DOT_INL_H_
#undef FULGUR_CPU_DOT_INL_H_
#else
#define FULGUR_CPU_DOT_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "cpu/kernels/bf16/amx-inl.h"

// Every CPU with AVX512-BF16 has this target.
#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The instruction as inline assembly, which needs only an assembler that knows it.
struct Avx512Bf16 {
  /// c + the products of the pairs of a and b, the upper halves first, in f32. Denormal numbers
  /// count as 0.
  static HWY_INLINE __m512 add(__m512 c, __m512i a, __m512i b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
  }
};

/// Products by dot products. Each is made at once: the CPU's out-of-order execution overlaps it
/// with other work.
template <class Dot, bool kBiased = false>
class DotProducts {
 public:
  static constexpr bool kAtOnce = true;

  struct Session {
    Session() {}  // a constructor, so that compilers do not warn of an unused variable
  };

  /// `p` is a copy, so that the compiler keeps it in registers.
  HWY_NOINLINE void multiply(Product p) {
    for (int64_t n = 0; n < p.there.columns; n += 2 * kTileRows) {
      if (n + kTileRows < p.there.columns) {
        for (int64_t m = 0; m < p.there.rows; m += 8) block<8, 2>(p, m, n);
      } else {
        for (int64_t m = 0; m < p.there.rows; m += 16) block<16, 1>(p, m, n);
      }
    }
  }
  void defer(const Product& p) { multiply(p); }
  int64_t left() const { return 0; }
  template <int kSlices>
  void slice(int) {}
  void finish() {}
  void flush() {}

 private:
  /// Computes kRows rows of C from row m on, and kVectors vectors from column n on. Sums begin with
  /// what C has, so that they have the same bits whether their steps are one product or several.
  template <int kRows, int kVectors>
  static HWY_INLINE void block(const Product& p, int64_t m, int64_t n) {
    const int64_t ldc = p.ldc, lda = p.A.stride / 2, stride = p.B.stride / 2;
    float* const C = p.C + m * ldc + n / kTileRows * column_of<kBiased>();
    __m512 sum[kRows][kVectors];
    FULGUR_UNROLL for (int r = 0; r < kRows; ++r) {
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
        sum[r][v] =
            p.add ? _mm512_loadu_ps(C + r * ldc + v * column_of<kBiased>()) : _mm512_setzero_ps();
      }
    }
    for (int64_t s = 0, left = p.there.depth; left > 0; ++s, left -= kTileDepth) {
      const uint16_t* a = p.A.at(m / kTileRows, s) + m % kTileRows * lda;
      const uint16_t* b[kVectors];
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) b[v] = p.B.at(n / kTileRows + v, s);
      const int64_t pairs_there = (std::min(left, kTileDepth) + 1) / 2;
      for (int64_t pair = 0; pair < pairs_there; ++pair, a += 2) {
        __m512i pairs[kVectors];
        FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
          pairs[v] = _mm512_load_si512(b[v] + pair * stride);
        }
        FULGUR_UNROLL for (int r = 0; r < kRows; ++r) {
          int32_t pair_of_row;
          std::memcpy(&pair_of_row, a + r * lda, 4);
          const __m512i x = _mm512_set1_epi32(pair_of_row);
          FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
            sum[r][v] = Dot::add(sum[r][v], x, pairs[v]);
          }
        }
      }
    }
    FULGUR_UNROLL for (int r = 0; r < kRows; ++r) {
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
        _mm512_storeu_ps(C + r * ldc + v * column_of<kBiased>(), sum[r][v]);
      }
    }
  }
};

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
