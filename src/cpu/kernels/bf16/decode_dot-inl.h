// Decoding (decode-inl.h) of bf16 by dot products of pairs: pairs along d for K, as they lie in
// memory, and pairs of keys for V.
#if defined(FULGUR_CPU_DOT_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_DOT_DECODE_INL_H_
#undef FULGUR_CPU_DOT_DECODE_INL_H_
#else
#define FULGUR_CPU_DOT_DECODE_INL_H_
#endif

#include "cpu/kernels/bf16/dot-inl.h"
#include "cpu/kernels/simd/decode-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// Products of bf16 in pairs, by the instruction `Dot`.
template <class Dot>
struct DottedPairs {
  using Element = uint16_t;  // the elements of Q
  using Vector = __m512i;
  static constexpr int64_t kElements = 32;
  static constexpr int64_t kStep = kElements;

  static HWY_INLINE Vector key(const char* row, int64_t c) {
    return _mm512_loadu_si512(row + 2 * c);
  }
  static HWY_INLINE Vector key(const char* row, int64_t c, int64_t n) {
    return _mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, row + 2 * c);
  }
  static HWY_INLINE Vector query(const Element* at) { return _mm512_load_si512(at); }
  static HWY_INLINE V32 add(V32 sum, Vector a, Vector b) { return V32{Dot::add(sum.raw, a, b)}; }

  /// Loads Q [count][ldq] of a task's rows; returns the factor by which scores are still to be
  /// scaled.
  static float load(const Task& task, const ForwardArgs& args, int64_t count, Element* Q,
                    int64_t ldq) {
    const Problem& p = task.problem;
    for (int64_t r = 0; r < count; ++r, Q += ldq) {
      const auto* const from =
          static_cast<const uint16_t*>(address(args.q, row_offset(task, p.q, r)));
      std::fill(std::copy_n(from, p.d, Q), Q + ldq, 0);
    }
    return query_factor(p);
  }
  static HWY_INLINE void dot(const Task& first, const DecodeOperand& K, int64_t heads,
                             const KeyTile& tile, int64_t key_end, const Element* HWY_RESTRICT Q,
                             float factor, const DecodeRows& all) {
    dot_keys<DottedPairs>(DecodeTile(first, K.t, K.layout, K.dim, tile.j, tile.n, key_end), tile.n,
                          K.dim, Q, factor, {0, heads, first.rows(), all.S}, all);
  }
  static void add_values(const Task& first, const DecodeOperand& V, int64_t heads,
                         const KeyTile& tile, int64_t key_end, const DecodeRows& all);
};

/// Two rows of V, interleaved: kVectors vectors of 16 columns.
template <int kVectors>
struct ValuePairs {
  __m512i of[kVectors];
  __mmask32 denormal = 0;  // dot products would take them for 0

  /// Loads columns from the addresses on, of which only `columns` exist if kVectors is 1. `odd` may
  /// be null, for a row of zeros.
  HWY_INLINE void load(const char* even, const char* odd, int64_t columns) {
    if constexpr (kVectors == 1) {
      const auto there = static_cast<__mmask16>((1u << columns) - 1);
      const __m256i x = _mm256_maskz_loadu_epi16(there, even);
      const __m256i y =
          odd == nullptr ? _mm256_setzero_si256() : _mm256_maskz_loadu_epi16(there, odd);
      __m512i parts[kPartsOfBF16];
      split_pair<Side::kB>(x, y, parts);
      of[0] = parts[0];
      denormal = denormals(of[0]);
    } else {
      alignas(64) static constexpr uint16_t kPairs[2][32] = {
          {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
          {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
           24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
      denormal = 0;
      FULGUR_UNROLL for (int v = 0; v < kVectors; v += 2) {
        const __m512i x = _mm512_loadu_si512(even + 32 * v);
        const __m512i y =
            odd == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(odd + 32 * v);
        of[v] = _mm512_permutex2var_epi16(x, _mm512_load_si512(kPairs[0]), y);
        of[v + 1] = _mm512_permutex2var_epi16(x, _mm512_load_si512(kPairs[1]), y);
        denormal |= denormals(x) | denormals(y);
      }
    }
  }

 private:
  static HWY_INLINE __mmask32 denormals(__m512i x) {
    return _mm512_mask_test_epi16_mask(_mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x7f80)), x,
                                       _mm512_set1_epi16(0x7f));
  }
};

/// O[row][c] += sum of P V over kCount pairs of keys, for 16 kVectors columns, of which `columns`
/// exist. odd[s] may be null. P has the lanes of the head: those of even keys are `step` floats
/// apart, those of odd keys `lds` floats after them. `weights` takes P in pairs.
template <int kVectors, int kCount, class Dot>
HWY_INLINE void add_pairs(const char* const (&even)[kCount], const char* const (&odd)[kCount],
                          int64_t columns, const uint32_t (&weights)[kCount][16],
                          const float* HWY_RESTRICT P, int64_t step, int64_t lds,
                          float* HWY_RESTRICT O, int64_t ldo, int64_t rows) {
  ValuePairs<kVectors> value[kCount];
  __mmask32 denormal = 0;
  FULGUR_UNROLL for (int s = 0; s < kCount; ++s) {
    value[s].load(even[s], odd[s], columns);
    denormal |= value[s].denormal;
  }
  if (HWY_UNLIKELY(denormal != 0)) {
    add_rows<DType::kBF16, kCount>(even, columns, P, step, O, ldo, rows);
    if (odd[0] != nullptr) {
      add_rows<DType::kBF16, kCount>(odd, columns, P + lds, step, O, ldo, rows);
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r, O += ldo) {
    __m512 sum[kVectors];
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) sum[v] = _mm512_load_ps(O + v * kLanes);
    FULGUR_UNROLL for (int s = 0; s < kCount; ++s) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[s][r]));
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
        sum[v] = Dot::add(sum[v], weight, value[s].of[v]);
      }
    }
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) _mm512_store_ps(O + v * kLanes, sum[v]);
  }
}

/// O += P^T V of a tile; at most 16 rows a head.
template <class Dot>
HWY_INLINE void DottedPairs<Dot>::add_values(const Task& first, const DecodeOperand& values,
                                             int64_t, const KeyTile& tile, int64_t key_end,
                                             const DecodeRows& all) {
  const int64_t n = tile.n, dv = values.dim, rows = first.rows();
  const int64_t ldo = round_up(dv, kLanes), width = all.width;
  const DecodeTile V(first, values.t, values.layout, dv, tile.j, n, key_end);
  for_streams<2>(n, [&](auto streams, int64_t j, int64_t step) HWY_ATTR {
    constexpr int kCount = decltype(streams)::value;
    const bool pair = j + 1 < n;
    for (int64_t i = 0, r = 0; r < all.count; ++i, r += rows) {
      const float* const P = all.S + j * width + r;
      float* const O = all.O + r * ldo;
      alignas(64) uint32_t weights[kCount][16];
      const char *even[kCount], *odd[kCount];
      FULGUR_UNROLL for (int s = 0; s < kCount; ++s) {
        const int64_t key = j + s * step;
        const float* const at = P + s * step * width;
        const __m512 second = pair ? _mm512_loadu_ps(at + width) : _mm512_setzero_ps();
        _mm512_store_si512(weights[s],
                           pair_halves(round_up_half(_mm512_loadu_ps(at)), round_up_half(second)));
        even[s] = V.row(key, i);
        odd[s] = pair ? V.row(key + 1, i) : nullptr;
      }
      const auto add = [&](auto vectors, int64_t c) HWY_ATTR {
        constexpr int kVectors = decltype(vectors)::value;
        add_pairs<kVectors, kCount, Dot>(even, odd, std::min(dv - c, kVectors * kLanes), weights, P,
                                         step * width, width, O + c, ldo, rows);
        FULGUR_UNROLL for (int s = 0; s < kCount; ++s) {
          even[s] += 2 * kVectors * kLanes;
          if (pair) odd[s] += 2 * kVectors * kLanes;
        }
      };
      int64_t c = 0;
      for (; c + 4 * kLanes <= dv; c += 4 * kLanes) add(std::integral_constant<int, 4>(), c);
      for (; c + 2 * kLanes <= dv; c += 2 * kLanes) add(std::integral_constant<int, 2>(), c);
      for (; c < dv; c += kLanes) add(std::integral_constant<int, 1>(), c);
    }
  });
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
