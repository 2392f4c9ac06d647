// Numbers as operands of products of bf16. A number of bf16 is an operand itself. A product of
// numbers of f16, or of f32 and f16, is the sum of three products, each of a part of A's element
// and a part of B's:
//
//   A:  a = 63/64 x, rounded     e = x - a        f = x - 64 e
//   B:  b = 257/256 y, cut off   c = b + 64 g     g = y - b
//
//   a b + e c + f g = (a + e) b + (64 e + f) g = x b + x g = x y
//
// Parts have the 8 bits of bf16. The parts of f16, which has 11 bits, are exact, and so is the
// product. Probabilities, which become such operands, have an exponential of their precision.
#if defined(FULGUR_CPU_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_OPERANDS_INL_H_
#undef FULGUR_CPU_OPERANDS_INL_H_
#else
#define FULGUR_CPU_OPERANDS_INL_H_
#endif

#include "cpu/kernels/simd/vector-inl.h"

// Every CPU with AMX or AVX512-BF16 has this target.
#if HWY_TARGET == HWY_AVX3

#include <immintrin.h>

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The number of parts of an element.
constexpr int kPartsOfBF16 = 1, kPartsOfF16 = 3;

/// The operand of an element.
enum class Side { kA, kB };

/// Rounds floats to bf16 in the upper halves, to nearest, ties away from 0. A NaN whose lower half
/// is 0 stays NaN.
HWY_INLINE __m512i round_up_half(__m512 x) {
  return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
}

/// Splits floats into parts, in the upper halves of 32 bits and in the order in which parts of A
/// are multiplied by those of B. A number that is not finite is its own first part, and its other
/// parts are 0, so that products have the results of f32.
template <Side kSide, int kParts>
HWY_INLINE void split(V32 number, __m512i (&parts)[kParts]) {
  const __m512 x = number.raw;
  if constexpr (kParts == kPartsOfBF16) {
    parts[0] = round_up_half(x);
  } else {
    constexpr bool kOfA = kSide == Side::kA;
    constexpr int kNan = 0x81, kInfinite = 0x18;
    const __mmask16 finite = _knot_mask16(_mm512_fpclass_ps_mask(x, kNan | kInfinite));
    const __m512 near = _mm512_mul_ps(x, _mm512_set1_ps(kOfA ? 63.0f / 64 : 257.0f / 256));
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    parts[0] = _mm512_mask_and_epi32(_mm512_castps_si512(x), finite, upper,
                                     kOfA ? round_up_half(near) : _mm512_castps_si512(near));
    const __m512 first = _mm512_castsi512_ps(parts[0]), factor = _mm512_set1_ps(64);
    const __m512 rest = _mm512_maskz_sub_ps(finite, x, first);
    parts[kOfA ? 1 : 2] = round_up_half(rest);
    parts[kOfA ? 2 : 1] = round_up_half(kOfA ? _mm512_maskz_fnmadd_ps(finite, rest, factor, x)
                                             : _mm512_maskz_fmadd_ps(finite, rest, factor, first));
  }
}

/// Interleaves the upper halves of a and b: a row of B from two rows of C.
HWY_INLINE __m512i pair_halves(__m512i a, __m512i b) {
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(b, 0x3333333333333333, a, upper);
}

/// The upper halves of a, then of b: a row of A from a row of C.
HWY_INLINE __m512i join_halves(__m512i a, __m512i b) {
  alignas(64) static constexpr uint16_t kJoined[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                       23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                       45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(kJoined), b);
}

/// Splits 32 elements into parts.
template <Side kSide, int kParts>
HWY_INLINE void split_row(__m512i elements, __m512i (&parts)[kParts]) {
  if constexpr (kParts == kPartsOfBF16) {
    parts[0] = elements;
  } else {
    __m512i low[kParts], high[kParts];
    split<kSide>(V32{_mm512_cvtph_ps(_mm512_castsi512_si256(elements))}, low);
    split<kSide>(V32{_mm512_cvtph_ps(_mm512_extracti64x4_epi64(elements, 1))}, high);
    FULGUR_UNROLL for (int p = 0; p < kParts; ++p) parts[p] = join_halves(low[p], high[p]);
  }
}

/// Splits 16 elements of each of two rows into parts, and interleaves the rows.
template <Side kSide, int kParts>
HWY_INLINE void split_pair(__m256i even, __m256i odd, __m512i (&parts)[kParts]) {
  if constexpr (kParts == kPartsOfBF16) {
    parts[0] = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                               _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
  } else {
    __m512i low[kParts], high[kParts];
    split<kSide>(V32{_mm512_cvtph_ps(even)}, low);
    split<kSide>(V32{_mm512_cvtph_ps(odd)}, high);
    FULGUR_UNROLL for (int p = 0; p < kParts; ++p) parts[p] = pair_halves(low[p], high[p]);
  }
}

/// Splits 32 elements of each of two rows into parts, and interleaves the rows: columns 0 to 3 of
/// every 8 in `low`, columns 4 to 7 in `high`.
template <Side kSide, int kParts>
HWY_INLINE void split_pairs(__m512i even, __m512i odd, __m512i (&low)[kParts],
                            __m512i (&high)[kParts]) {
  if constexpr (kParts == kPartsOfBF16) {
    low[0] = _mm512_unpacklo_epi16(even, odd);
    high[0] = _mm512_unpackhi_epi16(even, odd);
  } else {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i x = _mm512_permutexvar_epi64(order, even);
    const __m512i y = _mm512_permutexvar_epi64(order, odd);
    split_pair<kSide>(_mm512_castsi512_si256(x), _mm512_castsi512_si256(y), low);
    split_pair<kSide>(_mm512_extracti64x4_epi64(x, 1), _mm512_extracti64x4_epi64(y, 1), high);
  }
}

/// 2^r on [0, 1), exact at 0: relative-minimax coefficients.
constexpr float kExp2[] = {1.0f, 0.6930448412895203f, 0.241280198097229f, 0.052242472767829895f,
                           0.013426683843135834f};

/// 2^x for x <= 127, with a relative error of 2^-18: less than the rounding of bf16 and of parts,
/// and LSE averages it out. 0 for x < -126; if kFlushed, Flushing does that. NaN stays.
template <bool kFlushed = false>
HWY_INLINE V32 exp2_short(V32 x) {
  // 2^x = 2^floor(x) 2^r: reduce gives r in [0, 1), scalef multiplies by 2^floor(x).
  const __m512 r = _mm512_reduce_ps(x.raw, 0x09);
  __m512 p = _mm512_set1_ps(kExp2[4]);
  FULGUR_UNROLL for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2[i]));
  if constexpr (kFlushed) return V32{_mm512_scalef_ps(p, x.raw)};
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return V32{_mm512_maskz_scalef_ps(normal, p, x.raw)};
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
