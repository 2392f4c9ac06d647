// FlashAttention-2 forward (Alg. 1) of bf16 and f16 on tiles or by dot products: S^T = K Q^T and
// O^T += V^T P^T, with a query row in each lane, as in simd/forward-inl.h. Two rows of P^T, rounded
// and merged, are a row of B of the second product. forward_schedule-inl.h has the schedule. K and
// V^T are A of the products, Q and P^T are B; S and P_wide are [kBc][width], O is O^T [dv in
// tiles][width], where `width` is 16 or 32 rows.
#if defined(FULGUR_CPU_TILE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_TILE_FORWARD_INL_H_
#undef FULGUR_CPU_TILE_FORWARD_INL_H_
#else
#define FULGUR_CPU_TILE_FORWARD_INL_H_
#endif

#include <type_traits>

#include "cpu/kernels/bf16/forward_schedule-inl.h"
#include "cpu/kernels/simd/forward-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The offset of P of keys jj and jj + 1 of a key tile in B.
template <int kParts>
HWY_INLINE int64_t pair_offset(int64_t jj, int64_t width) {
  return (jj + jj / kTileDepth * (kParts - 1) * kTileDepth) * width;
}

/// P [kBc][width] of a key tile as B.
template <int kParts>
HWY_INLINE void pack_probabilities(int64_t width, const float* HWY_RESTRICT P,
                                   uint16_t* HWY_RESTRICT to) {
  const F32 f;
  for (int64_t jj = 0; jj < kBc; jj += 2) {
    for (int64_t c = 0; c < width; c += kLanes) {
      const float* const at = P + jj * width + c;
      store_pair_of_b<kParts>(hn::Load(f, at), hn::Load(f, at + width), kTileDepth * width,
                              to + pair_offset<kParts>(jj, width) + 2 * c);
    }
  }
}

/// The maxima of the rows of factor S over a key tile.
template <int kVectors>
HWY_INLINE void maxima(float factor, const float* HWY_RESTRICT S, V32 (&highest)[kVectors]) {
  const F32 f;
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    highest[v] = hn::Set(f, -std::numeric_limits<float>::infinity());
  }
  for (int64_t jj = 0; jj < kBc; ++jj) {
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      highest[v] = hn::Max(highest[v], hn::Load(f, S + (jj * kVectors + v) * kLanes));
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    highest[v] = hn::Mul(highest[v], hn::Set(f, factor));
  }
}

/// The scores without a bias: of key jj and the rows of vector v.
struct NoBias {
  HWY_INLINE V32 add(V32 score, int64_t /*jj*/, int64_t /*v*/) const { return score; }
};
/// The scores plus `factor` times a bias of keys.
struct KeyBias {
  const float* keys;
  float factor;

  HWY_INLINE V32 add(V32 score, int64_t jj, int64_t) const {
    const F32 f;
    return hn::MulAdd(hn::Set(f, keys[jj]), hn::Set(f, factor), score);
  }
};

/// P = 2^(factor S - m) of a key tile, and its sums over the keys: packed as B, or in f32 if `To`
/// is float. A step of the products is made with each kSlices pairs of keys. Flushing must be on.
template <int kParts, int kVectors, int kSlices, class To, class Products, class Bias>
HWY_INLINE void tile_probabilities(float factor, const float* HWY_RESTRICT S,
                                   const float* HWY_RESTRICT m, To* HWY_RESTRICT P,
                                   V32 (&sum)[kVectors], Products& products, Bias bias) {
  constexpr int64_t kWidth = kVectors * kLanes;
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity()), c = hn::Set(f, factor);
  V32 shift[kVectors], total[kVectors];
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    // A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives P = 0.
    const V32 at = hn::Load(f, m + v * kLanes);
    shift[v] = hn::IfThenZeroElse(hn::Eq(at, none), at);
    total[v] = hn::Zero(f);
  }
  for (int64_t begin = 0; begin < kBc; begin += 2 * kSlices) {
    FULGUR_UNROLL for (int pair = 0; pair < kSlices; ++pair) {
      products.template slice<kSlices>(pair);
      const int64_t jj = begin + 2 * pair;
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
        const int64_t lane = v * kLanes;
        const float* const at = S + jj * kWidth + lane;
        const V32 s0 = bias.add(hn::Load(f, at), jj, v);
        const V32 s1 = bias.add(hn::Load(f, at + kWidth), jj + 1, v);
        const V32 p0 = exp2_short<true>(hn::MulSub(s0, c, shift[v]));
        const V32 p1 = exp2_short<true>(hn::MulSub(s1, c, shift[v]));
        total[v] = hn::Add(total[v], hn::Add(p0, p1));
        if constexpr (std::is_same_v<To, float>) {
          hn::Store(p0, f, P + jj * kWidth + lane);
          hn::Store(p1, f, P + (jj + 1) * kWidth + lane);
        } else {
          store_pair_of_b<kParts>(p0, p1, kTileDepth * kWidth,
                                  P + pair_offset<kParts>(jj, kWidth) + 2 * lane);
        }
      }
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) sum[v] = total[v];
}

/// O^T [dv][width] = O^T diag(alpha).
HWY_INLINE void rescale(const RowTile& row_tile, int64_t dv, const float* HWY_RESTRICT alpha,
                        float* HWY_RESTRICT Ot) {
  const F32 f;
  for (int64_t v = 0; v < row_tile.vectors; ++v) {
    const V32 a = hn::Load(f, alpha + v * kLanes);
    if (hn::AllTrue(f, hn::Eq(a, hn::Set(f, 1.0f)))) continue;
    for (int64_t c = 0; c < dv; ++c) {
      float* const o = Ot + c * row_tile.width() + v * kLanes;
      hn::Store(hn::Mul(hn::Load(f, o), a), f, o);
    }
  }
}

/// Two vectors as bf16 or f16, rounded as store_narrow does it.
template <DType kDType>
HWY_INLINE __m512i narrow(V32 low, V32 high) {
  if constexpr (kDType == DType::kF16) {
    const __m512i x = _mm512_castsi256_si512(_mm512_cvtps_ph(low.raw, 0));
    return _mm512_inserti64x4(x, _mm512_cvtps_ph(high.raw, 0), 1);
  } else {
    const auto round = [](V32 x) HWY_ATTR {
      const __m512i bits = _mm512_castps_si512(x.raw);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded =
          _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      // A NaN must not round to infinity.
      const __mmask16 nan = _mm512_cmp_ps_mask(x.raw, x.raw, _CMP_UNORD_Q);
      return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    };
    return join_halves(round(low), round(high));
  }
}

/// Stores the first `count` rows of C, from C^T [columns in tiles][width], each times its lane of
/// `scale` and rounded, to the addresses `to`.
template <DType kDType>
HWY_NOINLINE void store_sums(const float* HWY_RESTRICT Ct, int64_t columns, int64_t width,
                             V32 scale, int64_t count, uint16_t* const (&to)[kLanes]) {
  const F32 f;
  for (int64_t c = 0; c < columns; c += 32) {
    HWY_ALIGN float block[2][16][16];  // a cache line of each row
    for (int64_t half = 0; half < (columns - c > 16 ? 2 : 1); ++half) {
      __m512i r[16];
      FULGUR_UNROLL for (int i = 0; i < 16; ++i) {
        const V32 x = hn::Load(f, Ct + (c + half * 16 + i) * width);
        r[i] = _mm512_castps_si512(hn::Mul(x, scale).raw);
      }
      transpose_16(r);
      FULGUR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(block[half][i], r[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const __m512i row = narrow<kDType>(hn::Load(f, block[0][i]), hn::Load(f, block[1][i]));
      _mm512_mask_storeu_epi16(to[i] + c, first_halves(columns - c), row);
    }
  }
}

HWY_INLINE void store_sums(DType dtype, const float* HWY_RESTRICT Ct, int64_t columns,
                           int64_t width, V32 scale, int64_t count, uint16_t* const (&to)[kLanes]) {
  const auto store = dtype == DType::kF16 ? store_sums<DType::kF16> : store_sums<DType::kBF16>;
  store(Ct, columns, width, scale, count, to);
}

/// Stores O = O / l and LSE = ln 2 (m + log2 l) of a row tile (Alg. 1, lines 12 to 15).
HWY_INLINE void finish_tile_rows(const Task& task, const ForwardArgs& args, int64_t row,
                                 const RowTile& row_tile, const float* HWY_RESTRICT Ot,
                                 const float* HWY_RESTRICT m, const float* HWY_RESTRICT l) {
  const F32 f;
  const Problem& p = task.problem;
  RowWalk walk(task, row);
  for (int64_t v = 0; v < row_tile.vectors; ++v) {
    const int64_t count = std::min(kLanes, row_tile.count - v * kLanes);
    HWY_ALIGN float weight[kLanes] = {};
    uint16_t* out[kLanes];
    for (int64_t i = 0; i < count; ++i, walk.next()) {
      const int64_t r = v * kLanes + i;
      const RowEnd end = end_row(task, row + r, m[r], l[r]);
      weight[i] = end.weight;
      out[i] = static_cast<uint16_t*>(args.out.data) + walk.offset(p.out);
      if (p.has(Arg::kLse)) static_cast<float*>(args.lse.data)[walk.offset(p.lse)] = end.lse;
    }
    const V32 sum = hn::Load(f, l + v * kLanes);
    const V32 scale =
        hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(f)), hn::Div(hn::Load(f, weight), sum));
    store_sums(args.out.dtype, Ot + v * kLanes, p.dv, row_tile.width(), scale, count, out);
  }
}

/// The bias of a visit, with a query row in each lane: what load_bias() sets in the RowTile, which
/// holds that of one visit only.
struct LaneBias {
  float* memory = nullptr;
  const float *tile = nullptr, *hiding = nullptr;
  int64_t step = 0;
  const void* rows = nullptr;
};

/// A call without a bias, or with a bias of keys.
template <class Products, int kParts>
class TileForward
    : public ForwardSchedule<TileForward<Products, kParts>, LaneBias, Products, kParts> {
  using Walk = ForwardSchedule<TileForward, LaneBias, Products, kParts>;

 public:
  TileForward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
              float* scratch)
      : Walk(task, args, row_begin, row_end, scratch) {
    std::fill_n(alpha_, kTileBr, 1.0f);
  }

  void finish(int64_t row_begin) {
    for (int64_t i = 0; i < count_; ++i) {
      begin_sums(i);
      finish_tile_rows(task_, args_, row_begin + i * kTileBr, row_tiles_[i], s_.O[i], s_.m[i],
                       s_.l[i]);
    }
  }

 private:
  friend Walk;
  using typename Walk::Packed, typename Walk::Visit;
  using Walk::add_now, Walk::begin_sums, Walk::adds_bias;
  using Walk::fresh_, Walk::steady_, Walk::keys_, Walk::values_;
  using Walk::s_, Walk::products_, Walk::row_tiles_, Walk::count_, Walk::chunk_, Walk::spare_bias_;
  using Walk::task_, Walk::p_, Walk::args_, Walk::plain_, Walk::factor_, Walk::bias_factor_;

  static constexpr int64_t kRowSums = 1;

  template <class RowAt>
  static HWY_INLINE void pack_queries(const Rows<RowAt>& rows, int64_t width, uint16_t* to,
                                      Census* census) {
    pack_columns<kParts>(rows, width, to, census);
  }

  HWY_INLINE void pack_keys(const KeyTile& tile, int64_t place) {
    pack_rows<kParts>(key_rows(task_, args_.k, p_.k, p_.d, tile.j, tile.n), tile.n, s_.K[place],
                      &keys_[place]);
    pack_transposed<kParts>(key_rows(task_, args_.v, p_.v, p_.dv, tile.j, tile.n), tile.n,
                            place * kTileSteps, kChunkSteps, s_.V, &values_[place]);
  }

  int64_t O_floats(int64_t i) const { return blocks_of(p_.dv) * kTileRows * row_tiles_[i].width(); }

  bool find_bias(Visit* at) {
    RowTile& row_tile = row_tiles_[at->i];
    at->bias.memory = s_.bias[spare_bias_];
    if (!load_bias(task_, at->tile, false, at->bias.memory, &row_tile)) return false;
    spare_bias_ = 1 - spare_bias_;
    at->bias.tile = row_tile.bias;
    at->bias.step = row_tile.bias_step;
    at->bias.rows = row_tile.bias_rows;
    at->bias.hiding = row_tile.mask.hides() ? at->bias.memory : nullptr;
    return true;
  }

  bool can_add_bias(const Visit& at) const {
    return at.bias.tile != nullptr && at.bias.step == 0 && plain_ && row_tiles_[at.i].vectors == 2;
  }

  /// S^T = K Q^T
  Product scores(const Visit& at, float* S) {
    const int64_t steps = kParts * steps_of(p_.d), vectors = row_tiles_[at.i].vectors;
    return {false,
            blocks_of(at.tile.n),
            vectors,
            steps,
            Operand::packed(s_.K[at.place], steps),
            Operand::packed(s_.Q[at.i], steps),
            S,
            vectors * kLanes,
            {at.tile.n, row_tiles_[at.i].count, p_.d}};
  }

  /// O^T += V^T P^T for the blocks of rows of O^T before `end`.
  Product values(int64_t end, Packed* p) {
    if (p->begin == p->end || p->block >= end) return {};
    const int64_t keys = std::min(task_.s.sk - chunk_, p->end * kTileDepth);
    const int64_t vectors = row_tiles_[p->i].vectors, width = vectors * kLanes;
    const int64_t block = std::exchange(p->block, end);
    const Operand Vt = Operand::packed(s_.V, kParts * kChunkSteps);
    return {p->add,
            end - block,
            vectors,
            kParts * (p->end - p->begin),
            {Vt.at(block, kParts * p->begin), Vt.stride, Vt.block, Vt.step},
            {p->P, width * 4, kTileDepth, kTileRows * width * 2},
            s_.O[p->i] + block * kTileRows * width,
            width,
            {std::min(p_.dv, end * kTileRows) - block * kTileRows, row_tiles_[p->i].count,
             keys - p->begin * kTileDepth},
            true};
  }

  /// Whether P V may be a product of tiles. Tiles take denormal numbers for 0, and multiply an inf
  /// or NaN of V by the P = 0 of rows that do not see the key.
  static bool tiles_add(const Census& values, const RowTile& row_tile, const KeyTile& tile) {
    return !values.denormal() && (values.finite() || !row_tile.mask.hides(tile));
  }

  void probabilities(const Visit& at, float* S, Packed* before, Packed* now) {
    if (row_tiles_[at.i].vectors == 1) {
      probabilities_of<1>(at, S, before, now);
    } else {
      probabilities_of<2>(at, S, before, now);
    }
  }

  /// P of a tile, the next of group `now`, from S, while the products that wait are made.
  template <int kVectors>
  void probabilities_of(const Visit& at, float* S, Packed* before, Packed* now) {
    const int64_t i = at.i, width = kVectors * kLanes;
    const KeyTile& tile = at.tile;
    const bool adds = adds_bias(at);
    if (!adds) finish_scores(at, S);
    const bool by_tiles = adds || tiles_add(values_[at.place], row_tiles_[i], tile);
    const bool packed = by_tiles && p_.dropout_p == 0;
    uint16_t* P = now->P + kParts * (now->end - now->begin) * kTileDepth * width;
    const int64_t steps = products_.left();
    if (fresh_[i]) start_maximum<kVectors>(i, S);
    V32 sum[kVectors];
    const float* const m = s_.m[i];
    // Calls make(slices): the more steps of the products are left, the fewer slices has each.
    const auto by_steps = [&](const auto& make) HWY_ATTR {
      if constexpr (kVectors == 1) {
        make(std::integral_constant<int, 1>());
      } else if constexpr (Products::kAtOnce) {
        make(std::integral_constant<int, 4>());
      } else if (kParts == kPartsOfBF16 && steps <= kBc / 8) {
        make(std::integral_constant<int, 4>());
      } else {
        make(std::integral_constant<int, 2>());
      }
    };
    const auto of_scores = [&]() HWY_ATTR {
      if (!packed) {
        return tile_probabilities<kParts, kVectors, 1>(factor_, S, m, s_.P_wide, sum, products_,
                                                       NoBias());
      }
      by_steps([&](auto slices) HWY_ATTR {
        tile_probabilities<kParts, kVectors, slices>(factor_, S, m, P, sum, products_, NoBias());
      });
    };
    if (!adds) {
      of_scores();
    } else if constexpr (kVectors == 2) {
      by_steps([&](auto slices) HWY_ATTR {
        tile_probabilities<kParts, 2, slices>(factor_, S, m, P, sum, products_,
                                              KeyBias{at.bias.tile, bias_factor_});
      });
    }
    products_.finish();
    if (exceeds_max_sum<kVectors>(sum)) {
      if (adds) finish_scores(at, S);
      add_now(before, now);
      P = now->P;
      raise_maximum<kVectors>(i, S, sum);
      of_scores();
    }
    const F32 f;
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* const l = s_.l[i] + v * kLanes;
      hn::Store(hn::Add(hn::Load(f, l), sum[v]), f, l);
    }
    if (!by_tiles) add_now(before, now);
    now->end += steps_of(tile.n);
    if (packed) return;
    if (p_.dropout_p > 0) {
      const auto keep_scale = static_cast<float>(1 / (1 - p_.dropout_p));
      drop(task_.given.dropout, keep_scale, row_tiles_[i], tile, width, s_.P_wide, nullptr);
    }
    if (by_tiles) return pack_probabilities<kParts>(width, s_.P_wide, P);
    now->begin = now->end;
    add_by_vectors(i, tile);
  }

  /// Turns the products S of a visit into scores: scale, softcap, ALiBi, bias, mask.
  void finish_scores(const Visit& at, float* S) {
    RowTile& row_tile = row_tiles_[at.i];
    const KeyTile& tile = at.tile;
    row_tile.bias = at.bias.tile;
    row_tile.bias_step = at.bias.step;
    row_tile.bias_rows = at.bias.rows;
    row_tile.mask.hide(at.bias.hiding, tile.j, at.bias.step);
    row_tile.bias_memory = at.bias.memory;
    const bool biased = row_tile.bias != nullptr || row_tile.bias_rows != nullptr;
    const int64_t width = row_tile.width(), n = tile.n;
    if (plain_ && !biased && !tile.partial && n == kBc) return;
    const Flushing off(false);  // large softcaps make small numbers of scores
    if (plain_) {
      add_bias(p_, tile, bias_factor_, S, width, &row_tile);
      hide_scores(row_tile.mask, row_tile.vectors, tile, S, width);
    } else {
      scale_scores(n, width, query_factor(p_), S);
      score_rule(p_, tile, S, width, nullptr, &row_tile);
    }
    std::fill(S + n * width, S + kBc * width, -std::numeric_limits<float>::infinity());
  }

  /// Sets the maximum of the rows that have seen no key before this tile.
  template <int kVectors>
  HWY_NOINLINE void start_maximum(int64_t i, const float* S) {
    const F32 f;
    const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
    V32 highest[kVectors];
    maxima<kVectors>(factor_, S, highest);
    fresh_[i] = false;
    steady_[i] = true;
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* const m = s_.m[i] + v * kLanes;
      const V32 old = hn::Load(f, m);
      const V32 now = hn::IfThenElse(hn::Eq(old, none), highest[v], old);
      hn::Store(now, f, m);
      fresh_[i] |= !hn::AllFalse(f, hn::Eq(now, none));
      steady_[i] &= is_moderate(now);
    }
  }

  static HWY_INLINE bool is_moderate(V32 m) {
    const F32 f;
    return hn::AllTrue(f, hn::Lt(hn::Abs(m), hn::Set(f, kModerate)));
  }

  template <int kVectors>
  HWY_INLINE bool exceeds_max_sum(const V32 (&sum)[kVectors]) const {
    const F32 f;
    bool any = false;
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      any |= !hn::AllFalse(f, hn::Gt(sum[v], hn::Set(f, kMaxSum)));
    }
    return any;
  }

  /// Raises the maximum of the rows whose sum of P exceeds kMaxSum, and rescales their l and O
  /// (Alg. 1, lines 9 and 10).
  template <int kVectors>
  HWY_NOINLINE void raise_maximum(int64_t i, const float* S, const V32 (&sum)[kVectors]) {
    const F32 f;
    const Flushing off(false);  // what V has below 2^-126 stays
    V32 highest[kVectors];
    maxima<kVectors>(factor_, S, highest);
    steady_[i] = true;
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      float *const m = s_.m[i] + v * kLanes, *const l = s_.l[i] + v * kLanes;
      const V32 old = hn::Load(f, m);
      const auto above = hn::Gt(sum[v], hn::Set(f, kMaxSum));
      const V32 now = hn::IfThenElse(above, highest[v], old);
      const V32 rescale = exp2_short(hn::Sub(old, highest[v]));
      const V32 alpha = hn::IfThenElse(above, rescale, hn::Set(f, 1.0f));
      hn::Store(now, f, m);
      steady_[i] &= is_moderate(now);
      hn::Store(hn::Mul(hn::Load(f, l), alpha), f, l);
      hn::Store(alpha, f, alpha_ + v * kLanes);
    }
    rescale(row_tiles_[i], p_.dv, alpha_, s_.O[i]);
    std::fill_n(alpha_, kTileBr, 1.0f);
  }

  void add_by_vectors(int64_t i, const KeyTile& tile) {
    const Flushing off(false);
    const int64_t ld = blocks_of(p_.dv) * kTileRows;
    load_keys(task_, args_.v, p_.v, p_.dv, tile.j, tile.n, s_.V_wide, ld);
    accumulate_visible(row_tiles_[i], tile, p_.dv, s_.V_wide, ld, s_.P_wide, row_tiles_[i].width(),
                       alpha_, s_.O[i]);
  }

  HWY_ALIGN float alpha_[kTileBr];  // factors of O: 1 but in raise_maximum()
};

/// Floats of the scratch of tile_forward(), which has one sum of P for each row.
template <int kParts>
int64_t tile_forward_scratch(const Problem& p) {
  return tile_scratch<kParts>(p, 1);
}

template <class Products, int kParts>
void tile_forward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                  float* scratch) {
  TileForward<Products, kParts> block(task, args, row_begin, row_end, scratch);
  block.run();
  block.finish(row_begin);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
