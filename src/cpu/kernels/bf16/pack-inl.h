// Packs rows of bf16 and f16 as the operands A and B of products (amx-inl.h).
#if defined(FULGUR_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_PACK_INL_H_
#undef FULGUR_CPU_PACK_INL_H_
#else
#define FULGUR_CPU_PACK_INL_H_
#endif

#include "cpu/kernels/bf16/amx-inl.h"

#if HWY_TARGET == HWY_AVX3

#include <immintrin.h>

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// Properties of packed values that decide whether tiles and dot products may multiply them.
class Census {
 public:
  // Not default member initializers, which are compiled for the baseline CPU.
  HWY_INLINE Census() : largest_(_mm512_setzero_si512()), smallest_(_mm512_set1_epi16(-1)) {}
  HWY_INLINE void add(__m512i halves) {
    const __m512i size = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
    largest_ = _mm512_max_epu16(largest_, size);
    smallest_ = _mm512_min_epu16(smallest_, _mm512_sub_epi16(size, _mm512_set1_epi16(1)));
  }
  bool finite() const { return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(0x7f80)) == 0; }
  /// Whether all are below 2^40 in size, so that sums of products of two are far from overflow.
  bool moderate() const {
    return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(0x5380)) == 0;
  }
  /// Whether some are denormal. Tiles and dot products take these for 0.
  bool denormal() const { return _mm512_cmplt_epu16_mask(smallest_, _mm512_set1_epi16(0x7f)) != 0; }

 private:
  // The maximum of the magnitudes, and the minimum of magnitude - 1, for which 0 is the largest.
  __m512i largest_, smallest_;
};

/// The first n of a vector of 16-bit elements, or all.
HWY_INLINE __mmask32 first_halves(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}

/// `count` rows of 16-bit elements. Rows and columns after the last are read as 0.
template <class RowAt>
struct Rows {
  RowAt at;  // at(i): the address of row i
  int64_t count, columns;

  /// Columns [c, c + 32) of row i. If kWhole, the row exists and has all of them.
  template <bool kWhole>
  HWY_INLINE __m512i load_32(int64_t i, int64_t c) const {
    if constexpr (kWhole) return _mm512_loadu_si512(at(i) + c);
    if (i >= count || c >= columns) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(first_halves(columns - c), at(i) + c);
  }

  /// Calls body(whole) with whether all rows [i, i + n) and columns [c, c + m) exist, as a
  /// constant.
  template <class Body>
  HWY_INLINE void with_whole(int64_t i, int64_t n, int64_t c, int64_t m, const Body& body) const {
    if (i + n <= count && c + m <= columns) return body(std::true_type());
    return body(std::false_type());
  }
};
template <class RowAt>
Rows(RowAt, int64_t, int64_t) -> Rows<RowAt>;

/// Transposes 16 x 16 values of 32 bits: swaps lane j of r[i] with lane i of r[j].
HWY_INLINE void transpose_16(__m512i (&r)[16]) {
  __m512i t[16];
  FULGUR_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  FULGUR_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + i] holds columns i, i + 4, i + 8, i + 12 of rows 4 g to 4 g + 3.
  FULGUR_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  FULGUR_UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
}

HWY_INLINE void store_tile(const __m512i (&r)[16], uint16_t* HWY_RESTRICT to) {
  FULGUR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kTileDepth, r[i]);
}

/// Stores eight rows of a tile: four from `row` on, and four from `row` + 8 on.
HWY_INLINE void store_half_tile(const __m512i* r, int64_t row, uint16_t* HWY_RESTRICT to) {
  FULGUR_UNROLL for (int i = 0; i < 8; ++i) {
    _mm512_store_si512(to + (row + i / 4 * 8 + i % 4) * kTileDepth, r[i]);
  }
}

/// Packs rows as A, to be summed over their columns: tiles
/// [blocks_of(rows)][steps_of(columns)][kParts].
template <int kParts, class RowAt>
HWY_INLINE void pack_rows(const Rows<RowAt>& from, int64_t rows, uint16_t* HWY_RESTRICT to,
                          Census* census) {
  Census all = *census;
  for (int64_t b = 0; b < blocks_of(rows); ++b) {
    for (int64_t s = 0; s < steps_of(from.columns); ++s, to += kParts * kTileSize) {
      const int64_t i = b * kTileRows, c = s * kTileDepth;
      from.with_whole(i, kTileRows, c, kTileDepth, [&](auto whole) HWY_ATTR {
        FULGUR_UNROLL for (int r = 0; r < kTileRows; ++r) {
          __m512i x[kParts];
          split_row<Side::kA>(from.template load_32<decltype(whole)::value>(i + r, c), x);
          all.add(x[0]);
          FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
            _mm512_store_si512(to + p * kTileSize + r * kTileDepth, x[p]);
          }
        }
      });
    }
  }
  *census = all;
}

/// Packs rows as columns of B, to be summed over their columns: tiles
/// [blocks_of(rows)][steps_of(columns)][kParts].
template <int kParts, class RowAt>
HWY_INLINE void pack_columns(const Rows<RowAt>& from, int64_t rows, uint16_t* HWY_RESTRICT to,
                             Census* census) {
  Census all = *census;
  for (int64_t b = 0; b < blocks_of(rows); ++b) {
    for (int64_t s = 0; s < steps_of(from.columns); ++s) {
      const int64_t i = b * kTileRows, c = s * kTileDepth;
      __m512i r[kParts][16];
      from.with_whole(i, kTileRows, c, kTileDepth, [&](auto whole) HWY_ATTR {
        FULGUR_UNROLL for (int at = 0; at < 16; ++at) {
          __m512i x[kParts];
          split_row<Side::kB>(from.template load_32<decltype(whole)::value>(i + at, c), x);
          all.add(x[0]);
          FULGUR_UNROLL for (int p = 0; p < kParts; ++p) r[p][at] = x[p];
        }
      });
      for (int p = 0; p < kParts; ++p, to += kTileSize) {
        transpose_16(r[p]);
        store_tile(r[p], to);
      }
    }
  }
  *census = all;
}

/// Packs rows as B, to be summed over the rows: tiles [blocks_of(columns)][steps][kParts], of which
/// this fills step `step`. Each cache line is read once and completely, because rows a power of two
/// apart evict each other from the L1 cache. Calls between() before each two rows of 32 columns.
/// The rows of a pair are kApart from each other: neighbours, or rows of the two halves of the
/// step.
template <int kParts, int kApart = 1, class RowAt, class Between>
HWY_INLINE void pack_pairs(const Rows<RowAt>& from, int64_t step, int64_t steps,
                           uint16_t* HWY_RESTRICT to, Census* census, const Between& between) {
  static_assert(kApart == 1 || kApart == kTileDepth / 2);
  // Columns 0 to 15 are then the first four of every 8.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const int64_t blocks = blocks_of(from.columns);
  for (int64_t b = 0; b < blocks; b += 2) {
    const int64_t c = b * kTileRows;
    uint16_t* const tile = to + (b * steps + step) * kParts * kTileSize;
    uint16_t* const next = tile + steps * kParts * kTileSize;
    from.with_whole(0, kTileDepth, c, 2 * kTileRows, [&](auto whole) HWY_ATTR {
      FULGUR_UNROLL for (int pair = 0; pair < 16; ++pair) {
        between();
        const int64_t row = kApart == 1 ? 2 * pair : pair;
        const __m512i first = from.template load_32<decltype(whole)::value>(row, c);
        const __m512i second = from.template load_32<decltype(whole)::value>(row + kApart, c);
        __m512i x[kParts], y[kParts];
        split_pairs<Side::kB>(_mm512_permutexvar_epi64(order, first),
                              _mm512_permutexvar_epi64(order, second), x, y);
        census->add(x[0]);
        census->add(y[0]);
        FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
          const int64_t at = p * kTileSize + pair * kTileDepth;
          _mm512_store_si512(tile + at, x[p]);
          if (b + 1 < blocks) _mm512_store_si512(next + at, y[p]);
        }
      }
    });
  }
}

/// Packs columns as rows of A, to be summed over the rows: tiles
/// [blocks_of(columns)][steps][kParts], of which this fills steps_of(rows) from step `step` on.
template <int kParts, class RowAt>
HWY_INLINE void pack_transposed(const Rows<RowAt>& from, int64_t rows, int64_t step, int64_t steps,
                                uint16_t* HWY_RESTRICT to, Census* census) {
  Census all = *census;
  const int64_t blocks = blocks_of(from.columns);
  for (int64_t b = 0; b < blocks; b += 2) {
    for (int64_t s = 0; s < steps_of(rows); ++s) {
      const int64_t first = s * kTileDepth, c = b * kTileRows;
      __m512i low[kParts][16], high[kParts][16];
      from.with_whole(first, kTileDepth, c, 2 * kTileRows, [&](auto whole) HWY_ATTR {
        FULGUR_UNROLL for (int pair = 0; pair < 16; ++pair) {
          const int64_t i = first + 2 * pair;
          const __m512i even = from.template load_32<decltype(whole)::value>(i, c);
          const __m512i odd = from.template load_32<decltype(whole)::value>(i + 1, c);
          __m512i x[kParts], y[kParts];
          split_pairs<Side::kA>(even, odd, x, y);
          all.add(x[0]);
          all.add(y[0]);
          FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
            low[p][pair] = x[p];
            high[p][pair] = y[p];
          }
        }
      });
      for (int p = 0; p < kParts; ++p) {
        uint16_t* const tile = to + ((b * steps + step + s) * kParts + p) * kTileSize;
        uint16_t* const next = tile + steps * kParts * kTileSize;
        transpose_16(low[p]);
        store_half_tile(low[p], 0, tile);
        if (b + 1 < blocks) store_half_tile(low[p] + 8, 0, next);
        transpose_16(high[p]);
        store_half_tile(high[p], 4, tile);
        if (b + 1 < blocks) store_half_tile(high[p] + 8, 4, next);
      }
    }
  }
  *census = all;
}

/// Splits two vectors into parts, merges each part of both by kMerge, and stores the results
/// `stride` elements apart.
template <Side kSide, int kParts, auto kMerge>
HWY_INLINE void store_merged(V32 first, V32 second, int64_t stride, uint16_t* HWY_RESTRICT to) {
  __m512i x[kParts], y[kParts];
  split<kSide>(first, x);
  split<kSide>(second, y);
  FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
    _mm512_store_si512(to + p * stride, kMerge(x[p], y[p]));
  }
}

/// Stores two vectors as a row of A.
template <int kParts>
HWY_INLINE void store_row_of_a(V32 low, V32 high, int64_t stride, uint16_t* HWY_RESTRICT to) {
  store_merged<Side::kA, kParts, join_halves>(low, high, stride, to);
}

/// Stores two vectors, interleaved, as a row of A, for a B whose pairs of rows are a vector apart.
template <int kParts>
HWY_INLINE void store_pairs_of_a(V32 first, V32 second, int64_t stride, uint16_t* HWY_RESTRICT to) {
  store_merged<Side::kA, kParts, pair_halves>(first, second, stride, to);
}

/// Stores vectors of two rows, interleaved, as a row of B.
template <int kParts>
HWY_INLINE void store_pair_of_b(V32 even, V32 odd, int64_t stride, uint16_t* HWY_RESTRICT to) {
  store_merged<Side::kB, kParts, pair_halves>(even, odd, stride, to);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
