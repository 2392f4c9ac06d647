// The scores and probabilities of a row tile where a query row lies in a row of memory
// (biased_forward-inl.h): a dense bias, ALiBi, the mask, dropout. score-inl.h and row_tile-inl.h
// have these for a query row in each lane.
#if defined(FULGUR_CPU_ROW_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_ROW_SCORES_INL_H_
#undef FULGUR_CPU_ROW_SCORES_INL_H_
#else
#define FULGUR_CPU_ROW_SCORES_INL_H_
#endif

#include "cpu/kernels/bf16/forward_schedule-inl.h"
#include "cpu/kernels/simd/score-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// S and O lie in columns of tiles of 16 x 16: the floats of a column, and the offset of vector v
/// of row r. CPUs store and load tiles whose rows are farther apart more slowly.
constexpr int64_t kTileColumn = column_of<true>();
static_assert(kTileColumn == kTileBr * kLanes);
constexpr int64_t place_of(int64_t r, int64_t v) { return v * kTileColumn + r * kLanes; }

/// Prefetches row r of a bias for the keys of a tile.
template <DType kDType>
HWY_INLINE void prefetch_row(const BiasRows& rows, int64_t r) {
  if (!rows.given()) return;
  const char* const row = rows.at<kDType>(r);
  FULGUR_UNROLL for (int64_t byte = 0; byte < kBc * kBiasBytes<kDType>; byte += 64) {
    __builtin_prefetch(row + byte, 0, 2);
  }
}

/// No bias for the scores of vector v of row r.
struct NoRowBias {
  HWY_INLINE V32 add(V32 score, int64_t /*r*/, int64_t /*v*/) const { return score; }
  /// The lanes that the bias hides.
  __mmask16 hides(int64_t /*r*/, int64_t /*v*/) const { return 0; }
  /// Prefetches bias that is added later, with each row.
  void prefetch(int64_t /*r*/) const {}
};
/// Adds `factor` times a bias to the scores of vector v of row r.
template <DType kDType>
struct RowBias {
  const BiasRows rows;
  const float factor;
  const BiasRows later;  // of a tile that is visited later

  HWY_INLINE V32 add(V32 score, int64_t r, int64_t v) const {
    const F32 f;
    if constexpr (kDType == DType::kBool) {
      const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
      return V32{_mm512_mask_mov_ps(score.raw, hides(r, v), none.raw)};
    } else {
      return hn::MulAdd(load(r, v), hn::Set(f, factor), score);
    }
  }
  HWY_INLINE __mmask16 hides(int64_t r, int64_t v) const {
    if constexpr (kDType == DType::kBool) {
      const __m128i keys = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(r, v)));
      return _mm_testn_epi8_mask(keys, keys);
    } else {
      const __m512 hiding = _mm512_set1_ps(static_cast<float>(kernels::kHidingBias));
      return _mm512_cmp_ps_mask(load(r, v).raw, hiding, _CMP_LT_OQ);
    }
  }
  HWY_INLINE void prefetch(int64_t r) const { prefetch_row<kDType>(later, r); }

 private:
  HWY_INLINE const char* at(int64_t r, int64_t v) const {
    return rows.at<kDType>(r) + v * kLanes * kBiasBytes<kDType>;
  }
  HWY_INLINE V32 load(int64_t r, int64_t v) const {
    if constexpr (kDType == DType::kBF16) {
      return widen_half(_mm512_loadu_si512(at(r, v / 2 * 2)), v % 2);
    } else {
      return load_bias_keys<kDType, F32>(at(r, v));
    }
  }
  /// Half `half` of a vector of bf16 as floats.
  static HWY_INLINE V32 widen_half(__m512i both, int64_t half) {
    alignas(64) static constexpr uint16_t kPlaces[2][32] = {
        {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
         0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15},
        {0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23,
         0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31}};
    const __m512i places = _mm512_load_si512(kPlaces[half]);
    return V32{_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, both))};
  }
};

/// S -= slope |distance of the key from the row's diagonal|
HWY_NOINLINE inline void alibi_rows(const RowTile& row_tile, const KeyTile& tile, int64_t rows,
                                    float* HWY_RESTRICT S) {
  const F32 f;
  for (int64_t r = 0; r < rows; ++r) {
    const V32 slope = hn::Set(f, row_tile.slope[r]);
    const V32 diagonal = hn::Set(f, static_cast<float>(row_tile.diagonal[r] - tile.j));
    for (int64_t v = 0; v < kBc / kLanes; ++v) {
      float* const at = S + place_of(r, v);
      const auto key = static_cast<float>(v * kLanes);
      const V32 distance = hn::Abs(hn::Sub(diagonal, hn::Iota(f, key)));
      hn::Store(hn::NegMulAdd(slope, distance, hn::Load(f, at)), f, at);
    }
  }
}

/// Sets the scores of keys that a row does not see to -inf, and adds the bias to the others. Bit k
/// of seen[r] becomes whether row r sees key k of the tile; returns whether some row does not see
/// all.
template <class Bias>
HWY_NOINLINE bool hide_rows(const RowTile& row_tile, const KeyTile& tile, int64_t rows,
                            const Bias& bias, float* HWY_RESTRICT S, uint64_t* HWY_RESTRICT seen) {
  const F32 f;
  const uint64_t all = ~uint64_t{0} >> (kBc - tile.n);
  bool hides = false;
  for (int64_t r = 0; r < rows; ++r) {
    seen[r] = tile.partial ? row_tile.mask.keys_of(r, tile) : all;
    for (int64_t v = 0; v < kBc / kLanes; ++v) {
      seen[r] &= ~(uint64_t{bias.hides(r, v)} << v * kLanes);
      const auto lanes = static_cast<__mmask16>(seen[r] >> v * kLanes);
      float* const at = S + place_of(r, v);
      const V32 score = bias.add(hn::Load(f, at), r, v);
      const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
      hn::Store(V32{_mm512_mask_mov_ps(none, lanes, score.raw)}, f, at);
    }
    hides |= seen[r] != all;
  }
  return hides;
}

/// Dropout of P [rows][kBc], with the random numbers of drop().
HWY_INLINE void drop_rows(const kernels::DropoutMask& mask, float keep_scale,
                          const RowTile& row_tile, const KeyTile& tile, int64_t rows,
                          float* HWY_RESTRICT P) {
  static_assert(kernels::kDropoutKeys * kLanes == kBc);
  const F32 f;
  const U32 u;
  const auto first = static_cast<uint32_t>((row_tile.dropout_key + tile.j) / kernels::kDropoutKeys);
  for (int64_t r = 0; r < rows; ++r) {
    hn::Vec<U32> words[kernels::kDropoutKeys] = {hn::Iota(u, first), hn::Set(u, row_tile.query[r]),
                                                 hn::Set(u, row_tile.head_lo[r]),
                                                 hn::Set(u, row_tile.head_hi[r])};
    random_words(mask.key, words);
    uint64_t kept = 0;  // a bit for each key: word w is of keys w, w + 4, w + 8 and so on
    for (int w = 0; w < kernels::kDropoutKeys; ++w) {
      const __mmask16 keeps = _mm512_cmpge_epu32_mask(
          words[w].raw, _mm512_set1_epi32(static_cast<int>(mask.threshold)));
      kept |= _pdep_u64(keeps, 0x1111111111111111 << w);
    }
    for (int64_t v = 0; v < kBc / kLanes; ++v) {
      const auto keeps = static_cast<__mmask16>(kept >> v * kLanes);
      float* const at = P + r * kBc + v * kLanes;
      hn::Store(V32{_mm512_maskz_mul_ps(keeps, hn::Load(f, at).raw, _mm512_set1_ps(keep_scale))}, f,
                at);
    }
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
