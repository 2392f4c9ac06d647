// FlashAttention-2 forward (Alg. 1) of bf16 and f16 with a dense bias of queries and keys: S = Q
// K^T and O += P V. A query row lies in a row of memory, as in the tensors, so that the bias is
// added without being transposed. Two vectors of P, rounded and merged, are a row of A of the
// second product. forward_schedule-inl.h has the schedule. Q and P are A of the products, K and V
// are B; S and O lie in columns of tiles (row_scores-inl.h), P_wide is [kTileBr][kBc]. Without such
// a bias this takes longer than forward-inl.h at d 64 (notes/cpu_bias.md).
#if defined(FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_
#undef FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_
#else
#define FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_
#endif

#include <type_traits>
#include <utility>

#include "call/make_problem.h"
#include "cpu/kernels/bf16/forward-inl.h"
#include "cpu/kernels/bf16/row_scores-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The distance of the two keys of a pair, a row of V as B. P of a pair comes from two neighbouring
/// vectors.
constexpr int kPairDistance = kTileDepth / 2;

/// A row has four sums of P, each over a block of four lanes, until it ends. So four rows share a
/// vector of sums.
constexpr int64_t kSums = 4, kRowsTogether = kLanes / kSums;

/// The offset of row r of P in A, of which each block of 16 rows has `steps` tiles.
HWY_INLINE int64_t row_offset_of_a(int64_t r, int64_t steps) {
  return (r / kTileRows * steps * kTileRows + r % kTileRows) * kTileDepth;
}

/// Stores a row of P of a key tile as a row of A.
template <int kParts>
HWY_INLINE void store_probabilities(const V32 (&p)[kBc / kLanes], uint16_t* HWY_RESTRICT to) {
  FULGUR_UNROLL for (int s = 0; s < kTileSteps; ++s) {
    store_pairs_of_a<kParts>(p[2 * s], p[2 * s + 1], kTileSize, to + s * kParts * kTileSize);
  }
}

/// P = 2^(factor S - shift) of a key tile: packed as A of `steps` tiles a block, or in f32 if `To`
/// is float. l_next is l plus the sums of P; returns the bits of the maximum of these sums. A step
/// of the products is made with each kSlices rows. Flushing must be on.
template <int kParts, int kSlices, class To, class Products, class Bias>
HWY_INLINE hn::Vec<U32> biased_probabilities(int64_t rows, float factor,
                                             const float* HWY_RESTRICT S,
                                             const float* HWY_RESTRICT shift, To* HWY_RESTRICT P,
                                             int64_t steps, const float* HWY_RESTRICT l,
                                             float* HWY_RESTRICT l_next, Products& products,
                                             Bias bias) {
  constexpr int kVectors = kBc / kLanes;
  static_assert(kVectors == 4 && kRowsTogether % kSlices == 0);
  const F32 f;
  const V32 c = hn::Set(f, factor);
  auto max_sum = hn::Zero(U32());
  for (int64_t first = 0; first < rows; first += kRowsTogether) {
    To* const to = P + (std::is_same_v<To, float> ? first * kBc : row_offset_of_a(first, steps));
    V32 sum[kRowsTogether];
    FULGUR_UNROLL for (int i = 0; i < kRowsTogether; ++i) {
      products.template slice<kSlices>(i % kSlices);
      const int64_t r = first + i;
      bias.prefetch(r);
      const V32 less = hn::Set(f, shift[r]);
      V32 p[kVectors];
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
        const V32 score = bias.add(hn::Load(f, S + place_of(r, v)), r, v);
        p[v] = exp2_short<true>(hn::MulSub(score, c, less));
      }
      sum[i] = hn::Add(hn::Add(p[0], p[1]), hn::Add(p[2], p[3]));
      if constexpr (std::is_same_v<To, float>) {
        FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
          hn::Store(p[v], f, to + i * kBc + v * kLanes);
        }
      } else {
        store_probabilities<kParts>(p, to + i * kTileDepth);
      }
    }
    transpose_blocks(f, sum);
    const V32 sums = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
    hn::Store(hn::Add(sums, hn::Load(f, l + first * kSums)), f, l_next + first * kSums);
    // The bits are in order, since no sum is negative, and NaN is above all numbers.
    max_sum = hn::Max(hn::BitCast(U32(), sums), max_sum);
  }
  return max_sum;
}

/// The rows of the bias of a visit, in the tensor or in memory; not given where the bias is 0.
struct RowsOfBias {
  BiasRows rows;
  DType dtype = DType::kF32;
};

/// A call with a dense bias of queries and keys.
template <class Products, int kParts>
class BiasedForward
    : public ForwardSchedule<BiasedForward<Products, kParts>, RowsOfBias, Products, kParts> {
  using Walk = ForwardSchedule<BiasedForward, RowsOfBias, Products, kParts>;

 public:
  BiasedForward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                float* scratch)
      : Walk(task, args, row_begin, row_end, scratch) {
    for (int64_t r = 0; r < kTileBr; ++r) row_in_memory_[r] = r * kBc;
  }

  /// Stores O = O / l and LSE = ln 2 (m + log2 l) (Alg. 1, lines 12 to 15).
  void finish(int64_t row_begin) {
    const F32 f;
    HWY_ALIGN float row[kMaxValueDim];
    for (int64_t i = 0; i < count_; ++i) {
      begin_sums(i);
      RowWalk walk(task_, row_begin + i * kTileBr);
      for (int64_t r = 0; r < row_tiles_[i].count; ++r, walk.next()) {
        float l = 0;
        for (int64_t k = 0; k < kSums; ++k) l += *sum_of(s_.l[i], r, k);
        const RowEnd end = end_row(task_, row_begin + i * kTileBr + r, s_.m[i][r], l);
        const V32 scale = hn::Set(f, l == 0 ? 0 : end.weight / l);
        for (int64_t v = 0; v < columns_; ++v) {
          hn::Store(hn::Mul(hn::Load(f, s_.O[i] + place_of(r, v)), scale), f, row + v * kLanes);
        }
        store_row(args_.out.dtype, row, p_.dv, address(args_.out, walk.offset(p_.out)));
        if (p_.has(Arg::kLse)) static_cast<float*>(args_.lse.data)[walk.offset(p_.lse)] = end.lse;
      }
    }
  }

 private:
  friend Walk;
  using typename Walk::Packed, typename Walk::Visit;
  using Walk::add_now, Walk::begin_sums, Walk::adds_bias;
  using Walk::fresh_, Walk::steady_, Walk::keys_, Walk::values_;
  using Walk::s_, Walk::products_, Walk::row_tiles_, Walk::count_, Walk::chunk_, Walk::spare_bias_;
  using Walk::task_, Walk::p_, Walk::args_, Walk::plain_, Walk::factor_, Walk::bias_factor_;

  static constexpr int64_t kRowSums = kSums;

  template <class RowAt>
  static HWY_INLINE void pack_queries(const Rows<RowAt>& rows, int64_t width, uint16_t* to,
                                      Census* census) {
    pack_rows<kParts>(rows, width, to, census);
  }

  HWY_INLINE void pack_keys(const KeyTile& tile, int64_t place) {
    pack_columns<kParts>(key_rows(task_, args_.k, p_.k, p_.d, tile.j, tile.n), tile.n, s_.K[place],
                         &keys_[place]);
    for (int64_t s = 0; s < steps_of(tile.n); ++s) {
      const int64_t key = s * kTileDepth;
      pack_pairs<kParts, kPairDistance>(
          key_rows(task_, args_.v, p_.v, p_.dv, tile.j + key, std::min(kTileDepth, tile.n - key)),
          place * kTileSteps + s, kChunkSteps, s_.V, &values_[place], [] {});
    }
  }

  int64_t O_floats(int64_t /*i*/) const { return columns_ * kTileColumn; }

  /// The address of sum k of row r.
  static float* sum_of(float* sums, int64_t r, int64_t k) {
    return sums + r / kRowsTogether * kLanes + k * kRowsTogether + r % kRowsTogether;
  }

  /// A bias that differs within the tile and lies in dense rows is used from the tensor, and not
  /// searched for rows that it hides.
  bool find_bias(Visit* at) {
    return with_bias_dtype(p_.bias.dtype,
                           [&](auto dtype) { return find_bias_of<decltype(dtype)::value>(at); });
  }
  template <DType kDType>
  HWY_NOINLINE bool find_bias_of(Visit* at) {
    const RowTile& row_tile = row_tiles_[at->i];
    const BiasRows rows(task_.given.bias.data, p_.bias, row_tile, at->tile.j);
    const bool in_tensor = !row_tile.shares_bias && at->tile.n == kBc && rows.dense(kDType);
    BiasOfTile is;
    if (in_tensor) {
      const auto uniform = uniform_tile<kDType>(rows, row_tile.width());
      if (!uniform) {
        at->bias = {rows, kDType};
        return true;
      }
      is = *uniform;
    } else {
      float* const memory = s_.bias[spare_bias_];
      is = load_bias_rows<kDType>(rows, row_tile.shares_bias ? 1 : row_tile.width(), at->tile.n,
                                  memory);
      if (!is.is_zero && !is.hides_all) {
        at->bias.rows = BiasRows(memory, row_tile.shares_bias ? same_row_ : row_in_memory_);
        spare_bias_ = 1 - spare_bias_;
      }
    }
    return !is.hides_all;
  }

  bool can_add_bias(const Visit& at) const { return at.bias.rows.given() && plain_; }

  /// The bias that is prefetched during a visit: that of the visit after the next, whose bias has
  /// been looked at.
  BiasRows later_bias(const Visit& at) const {
    constexpr int64_t kKeys = kChunk * kBc;
    int64_t i = at.i, j = at.tile.j, chunk = chunk_;
    for (int step = 0; step < 2; ++step) {
      j += kBc;
      if (j < std::min(chunk + kKeys, row_tiles_[i].mask.end())) continue;
      if (++i == count_) {
        i = 0;
        chunk += kKeys;
      }
      j = chunk;
    }
    const RowTile& row_tile = row_tiles_[i];
    if (p_.bias.key != 1 || row_tile.shares_bias || j >= row_tile.mask.end()) return {};
    return {task_.given.bias.data, p_.bias, row_tile, j};
  }
  void prefetch_bias(const Visit& at) const {
    with_bias_dtype(p_.bias.dtype, [later = later_bias(at)](auto dtype) HWY_ATTR {
      for (int64_t r = 0; r < kTileBr; ++r) prefetch_row<decltype(dtype)::value>(later, r);
    });
  }

  /// The rows of row tile i, and padding up to rows that share a vector of sums.
  int64_t rows_of(int64_t i) const { return round_up(row_tiles_[i].count, kRowsTogether); }

  /// S = Q K^T
  Product scores(const Visit& at, float* S) {
    const int64_t steps = kParts * steps_of(p_.d), count = row_tiles_[at.i].count;
    return {false,
            blocks_of(count),
            blocks_of(at.tile.n),
            steps,
            Operand::packed(s_.Q[at.i], steps),
            Operand::packed(s_.K[at.place], steps),
            S,
            kLanes,
            {count, at.tile.n, p_.d},
            false};
  }

  /// O += P V for the blocks of columns of O before `end`.
  Product values(int64_t end, Packed* p) {
    if (p->begin == p->end || p->block >= end) return {};
    const int64_t keys = std::min(task_.s.sk - chunk_, p->end * kTileDepth) - p->begin * kTileDepth;
    // A step has a pair for each key of its first half, whether its second half has keys or not.
    const int64_t depth =
        keys / kTileDepth * kTileDepth + std::min(kTileDepth, keys % kTileDepth * 2);
    const int64_t block = std::exchange(p->block, end), count = row_tiles_[p->i].count;
    return {p->add,
            blocks_of(count),
            end - block,
            kParts * (p->end - p->begin),
            Operand::packed(p->P, group_steps_),
            {Operand::packed(s_.V, kParts * kChunkSteps).at(block, kParts * p->begin), 64,
             kParts * kChunkSteps * kTileSize, kTileSize},
            s_.O[p->i] + block * kTileColumn,
            kLanes,
            {count, std::min(p_.dv, end * kTileRows) - block * kTileRows, depth},
            true};
  }

  /// P of a tile, the next of group `now`, from S, while the products that wait are made.
  void probabilities(const Visit& at, float* S, Packed* before, Packed* now) {
    const F32 f;
    const int64_t i = at.i, rows = rows_of(i);
    const KeyTile& tile = at.tile;
    const bool adds = adds_bias(at);
    if (!adds) {
      if (p_.has(Arg::kBias)) prefetch_bias(at);
      finish_scores(at, S);
    }
    // Tiles take denormal numbers for 0, and multiply an inf or NaN of V by the P = 0 of rows that
    // do not see the key.
    const Census& values = values_[at.place];
    const bool by_tiles = adds || (!values.denormal() && (values.finite() || !hides_));
    const bool packed = by_tiles && p_.dropout_p == 0;
    uint16_t* P = now->P + kParts * (now->end - now->begin) * kTileSize;
    const int64_t steps = products_.left();
    if (fresh_[i]) start_maxima(i, S);
    const auto make = [&](auto slices, auto* to, const auto& bias) HWY_ATTR {
      const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
      for (int64_t r = 0; r < kTileBr; r += kLanes) {
        // A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives P = 0.
        const V32 m = hn::Load(f, s_.m[i] + r);
        hn::Store(hn::IfThenZeroElse(hn::Eq(m, none), m), f, shift_ + r);
      }
      return biased_probabilities<kParts, decltype(slices)::value>(
          rows, factor_, S, shift_, to, group_steps_, s_.l[i], spare_l_, products_, bias);
    };
    // The more steps of the products are left, the fewer slices has each.
    const auto by_steps = [&](const auto& bias) HWY_ATTR {
      if (Products::kAtOnce || 4 * steps <= rows) {
        return make(std::integral_constant<int, 4>(), P, bias);
      }
      if (2 * steps <= rows) return make(std::integral_constant<int, 2>(), P, bias);
      return make(std::integral_constant<int, 1>(), P, bias);
    };
    const auto of_scores = [&]() HWY_ATTR {
      if (packed) return by_steps(NoRowBias());
      return make(std::integral_constant<int, 1>(), s_.P_wide, NoRowBias());
    };
    const auto max_sum =
        !adds ? of_scores() : with_bias_dtype(at.bias.dtype, [&](auto dtype) HWY_ATTR {
          return by_steps(
              RowBias<decltype(dtype)::value>{at.bias.rows, bias_factor_, later_bias(at)});
        });
    products_.finish();
    const U32 u;
    if (!hn::AllFalse(u, hn::Gt(max_sum, hn::BitCast(u, hn::Set(f, kMaxSum)))) &&
        any_exceeds_max_sum(i)) {
      if (adds) finish_scores(at, S);
      add_now(before, now);
      P = now->P;
      raise_maxima(i, S);
      of_scores();
    }
    std::swap(s_.l[i], spare_l_);
    if (!by_tiles) add_now(before, now);
    now->end += steps_of(tile.n);
    if (packed) return;
    if (p_.dropout_p > 0) {
      const auto keep_scale = static_cast<float>(1 / (1 - p_.dropout_p));
      drop_rows(task_.given.dropout, keep_scale, row_tiles_[i], tile, rows, s_.P_wide);
    }
    if (by_tiles) return pack_probabilities(rows, P);
    now->begin = now->end;
    add_by_vectors(i, tile);
  }

  /// Packs P_wide as A.
  void pack_probabilities(int64_t rows, uint16_t* P) const {
    const F32 f;
    for (int64_t r = 0; r < rows; ++r) {
      V32 p[kBc / kLanes];
      FULGUR_UNROLL for (int64_t v = 0; v < kBc / kLanes; ++v) {
        p[v] = hn::Load(f, s_.P_wide + r * kBc + v * kLanes);
      }
      store_probabilities<kParts>(p, P + row_offset_of_a(r, group_steps_));
    }
  }

  /// Turns the products S of a visit into scores: scale, softcap, ALiBi, bias, mask. Finds which
  /// keys each row sees.
  void finish_scores(const Visit& at, float* S) {
    const RowTile& row_tile = row_tiles_[at.i];
    const KeyTile& tile = at.tile;
    const int64_t rows = rows_of(at.i);
    hides_ = false;
    if (plain_ && !at.bias.rows.given() && !tile.partial && tile.n == kBc) {
      std::fill_n(seen_, rows, ~uint64_t{0});
      return;
    }
    const Flushing off(false);  // large softcaps make small numbers of scores
    if (!plain_) {
      scale_scores(kTileBr, kBc, query_factor(p_), S);
      if (p_.softcap > 0) softcap_scores(p_, kBc / kLanes, kTileBr, S, kBc, nullptr);
      if (p_.has(Arg::kAlibiSlopes)) alibi_rows(row_tile, tile, rows, S);
    }
    if (!at.bias.rows.given()) {
      hides_ = hide_rows(row_tile, tile, rows, NoRowBias(), S, seen_);
    } else {
      hides_ = with_bias_dtype(at.bias.dtype, [&](auto dtype) {
        const RowBias<decltype(dtype)::value> bias{at.bias.rows, bias_factor_, {}};
        return hide_rows(row_tile, tile, rows, bias, S, seen_);
      });
    }
  }

  /// The maxima of factor S over a tile, of 16 rows from row r on.
  HWY_INLINE V32 maxima(const float* HWY_RESTRICT S, int64_t r) const {
    const F32 f;
    __m512i lanes[kLanes];  // the maxima of each row, lane by lane
    FULGUR_UNROLL for (int64_t i = 0; i < kLanes; ++i) {
      V32 of_row = hn::Load(f, S + place_of(r + i, 0));
      FULGUR_UNROLL for (int64_t v = 1; v < kBc / kLanes; ++v) {
        of_row = hn::Max(of_row, hn::Load(f, S + place_of(r + i, v)));
      }
      lanes[i] = _mm512_castps_si512(of_row.raw);
    }
    transpose_16(lanes);
    V32 rows{_mm512_castsi512_ps(lanes[0])};
    FULGUR_UNROLL for (int i = 1; i < kLanes; ++i) {
      rows = hn::Max(rows, V32{_mm512_castsi512_ps(lanes[i])});
    }
    return hn::Mul(rows, hn::Set(f, factor_));
  }

  /// Sets the maxima of the rows that have seen no key before this tile.
  HWY_NOINLINE void start_maxima(int64_t i, const float* S) {
    const F32 f;
    const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
    fresh_[i] = false;
    steady_[i] = true;
    for (int64_t r = 0; r < row_tiles_[i].count; r += kLanes) {
      float* const m = s_.m[i] + r;
      const V32 old = hn::Load(f, m);
      const V32 now = hn::IfThenElse(hn::Eq(old, none), maxima(S, r), old);
      hn::Store(now, f, m);
      const auto there = hn::FirstN(f, static_cast<size_t>(row_tiles_[i].count - r));
      fresh_[i] |= !hn::AllFalse(f, hn::And(there, hn::Eq(now, none)));
      const auto moderate = hn::Lt(hn::Abs(now), hn::Set(f, kModerate));
      steady_[i] &= hn::AllTrue(f, hn::Or(hn::Not(there), moderate));
    }
  }

  /// Whether a sum of P of row r over this tile exceeds kMaxSum: spare_l_ has it, l does not yet.
  HWY_INLINE bool exceeds_max_sum(int64_t i, int64_t r) const {
    bool any = false;
    for (int64_t k = 0; k < kSums; ++k) {
      any |= *sum_of(spare_l_, r, k) - *sum_of(s_.l[i], r, k) > kMaxSum;
    }
    return any;
  }
  HWY_NOINLINE bool any_exceeds_max_sum(int64_t i) const {
    bool any = false;
    for (int64_t r = 0; r < row_tiles_[i].count; ++r) any |= exceeds_max_sum(i, r);
    return any;
  }

  /// Raises the maxima of the rows of which a sum of P exceeds kMaxSum, and rescales their l and O
  /// (Alg. 1, lines 9 and 10).
  HWY_NOINLINE void raise_maxima(int64_t i, const float* S) {
    const F32 f;
    const Flushing off(false);  // what V has below 2^-126 stays
    HWY_ALIGN float max[kTileBr];
    for (int64_t r = 0; r < kTileBr; r += kLanes) hn::Store(maxima(S, r), f, max + r);
    for (int64_t r = 0; r < row_tiles_[i].count; ++r) {
      if (!exceeds_max_sum(i, r)) continue;
      float& m = s_.m[i][r];
      const float old = std::exchange(m, max[r]);
      const float alpha = hn::GetLane(exp2_short(hn::Set(f, old - m)));
      for (int64_t k = 0; k < kSums; ++k) *sum_of(s_.l[i], r, k) *= alpha;
      for (int64_t v = 0; v < columns_; ++v) {
        float* const O = s_.O[i] + place_of(r, v);
        hn::Store(hn::Mul(hn::Load(f, O), hn::Set(f, alpha)), f, O);
      }
      steady_[i] &= std::abs(m) < kModerate;
    }
  }

  void add_by_vectors(int64_t i, const KeyTile& tile) {
    const F32 f;
    const Flushing off(false);
    load_keys(task_, args_.v, p_.v, p_.dv, tile.j, tile.n, s_.V_wide, columns_ * kLanes);
    for (int64_t r = 0; r < row_tiles_[i].count; ++r) {
      for (uint64_t left = seen_[r]; left != 0; left &= left - 1) {
        const int64_t key = std::countr_zero(left);
        const V32 p = hn::Set(f, s_.P_wide[r * kBc + key]);
        for (int64_t v = 0; v < columns_; ++v) {
          float* const O = s_.O[i] + place_of(r, v);
          const V32 values = hn::Load(f, s_.V_wide + (key * columns_ + v) * kLanes);
          hn::Store(hn::MulAdd(p, values, hn::Load(f, O)), f, O);
        }
      }
    }
  }

  const int64_t columns_ = blocks_of(p_.dv);  // of tiles of O
  const int64_t group_steps_ = kParts * group_of(p_.dv) * kTileSteps;
  int64_t row_in_memory_[kTileBr];        // where each row of s_.bias begins
  const int64_t same_row_[kTileBr] = {};  // the same where all rows share one row of bias
  HWY_ALIGN float shift_[kTileBr];        // what is subtracted from the scores of each row
  HWY_ALIGN float sums_[kTileBr * kSums];
  float* spare_l_ = sums_;  // takes the sums after a tile, then changes places with l
  uint64_t seen_[kTileBr];  // a bit for each key of a tile: whether the row sees it
  bool hides_ = false;      // whether some row does not see some key of a tile
};

/// Whether rows of a row tile may differ in their bias.
inline bool has_bias_of_rows(const Problem& p) {
  return p.has(Arg::kBias) && (p.bias.row != 0 || (p.bias.head != 0 && p.hq != p.hk));
}

/// Computes a block of rows by the pass for the call's bias. Products are those of tile_forward(),
/// whose A streams past the L1 cache, BiasedProducts those of BiasedForward, whose B does.
template <class Products, class BiasedProducts, int kParts>
void forward_of_bias(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                     float* scratch) {
  if (!has_bias_of_rows(task.problem)) {
    return tile_forward<Products, kParts>(task, args, row_begin, row_end, scratch);
  }
  BiasedForward<BiasedProducts, kParts> block(task, args, row_begin, row_end, scratch);
  block.run();
  block.finish(row_begin);
}

template <int kParts>
int64_t scratch_of_bias(const Problem& p) {
  return has_bias_of_rows(p) ? tile_scratch<kParts>(p, kSums) : tile_forward_scratch<kParts>(p);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
