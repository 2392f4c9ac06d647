// forward-inl.h with a dense bias of queries and keys: S = Q K^T and O += P V. A row lies in the
// lanes, as it does in the tensors, so that the bias is added as it comes. No tile is searched for
// the maxima of its rows, and sums are kept lane by lane. Two vectors of P, rounded and merged, are
// a row of the second product's A. Without such a bias it would take longer than forward-inl.h at
// d 64.
#if defined(FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_
#undef FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_
#else
#define FULGUR_CPU_BIASED_TILE_FORWARD_INL_H_
#endif

#include <type_traits>
#include <utility>

#include "cpu/kernels/bf16/forward-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// From a key to the one that it is summed with in a pair: as one vector of P from the next.
constexpr int kTilePairs = kTileDepth / 2;

/// Sums of a row, each of a block of lanes of vectors of P. Four rows lie in a vector, in turns.
constexpr int64_t kSums = 4, kRowsTogether = kLanes / kSums;

/// S and O lie in columns of tiles of 16 x 16: from one to the next, and where vector v of row r
/// is. Rows of tiles that are farther apart take CPUs longer to store and load.
constexpr int64_t kTileColumn = column_of<true>();
static_assert(kTileColumn == kTilePanelRows * kLanes);
constexpr int64_t place_of(int64_t r, int64_t v) { return v * kTileColumn + r * kLanes; }

/// The row block and a chunk of the keys in fast memory.
template <int kParts>
struct BiasedForwardScratch {
  uint16_t* Q[kTilePanels];   // rows of A, summed over d
  float* O[kTilePanels];      // in columns of tiles
  float* m[kTilePanels];      // [kTilePanelRows]
  float* l[kTilePanels + 1];  // [kTilePanelRows][kSums]: of keys that are kSums apart; a spare one
  uint16_t* K[kChunk];        // columns of B, summed over d
  uint16_t* V;                // B, summed over the keys of the chunk, kTilePairs apart
  float* S[2];                // in columns of tiles, of a key tile and the next
  uint16_t* P[2];             // rows of A, summed over keys, as V: of a group and the one before
  float* P_wide;              // [kTilePanelRows][kBc]: P that is not ready for tiles
  float* bias[2];             // [kTilePanelRows][kBc]: of the tile at hand and of the next
  float* V_wide;              // [kBc][dv in tiles]
  float* row;                 // [dv in tiles]: of O

  BiasedForwardScratch(const Problem& p, Arena& arena) {
    const int64_t d = kParts * steps_of(p.d) * kTileDepth, dv = blocks_of(p.dv) * kTileRows;
    for (int64_t i = 0; i < kTilePanels; ++i) {
      Q[i] = arena.take_halves(kTilePanelRows * d);
      O[i] = arena.take(kTilePanelRows * dv);
      m[i] = arena.take(kTilePanelRows);
    }
    for (float*& sums : l) sums = arena.take(kTilePanelRows * kSums);
    for (uint16_t*& tile : K) tile = arena.take_halves(kBc * d);
    V = arena.take_halves(kParts * kChunk * kBc * dv);
    for (float*& tile : S) tile = arena.take(kTilePanelRows * kBc);
    for (uint16_t*& packed : P) {
      packed = arena.take_halves(kParts * group_of(p.dv) * kTilePanelRows * kBc);
    }
    P_wide = arena.take(kTilePanelRows * kBc);
    V_wide = arena.take(kBc * dv);
    row = arena.take(dv);
    for (float*& tile : bias) tile = take_bias_tile(p, arena);
  }
};

template <int kParts>
int64_t biased_forward_scratch(const Problem& p) {
  Arena arena(nullptr);
  BiasedForwardScratch<kParts>(p, arena);
  return arena.used();
}

/// Where row r of P stands in its tiles, of which each block of rows has `steps`.
HWY_INLINE int64_t place_of_row(int64_t r, int64_t steps) {
  return (r / kTileRows * steps * kTileRows + r % kTileRows) * kTileDepth;
}

/// A row of P of a key tile as a row of A.
template <int kParts>
HWY_INLINE void store_probabilities(const V32 (&p)[kBc / kLanes], uint16_t* HWY_RESTRICT to) {
  FULGUR_UNROLL for (int s = 0; s < kTileSteps; ++s) {
    store_pairs_of_a<kParts>(p[2 * s], p[2 * s + 1], kTileSize, to + s * kParts * kTileSize);
  }
}

/// The bias of a chunk of keys and the rows of a panel, which is asked for while a panel before it
/// walks over its chunk: with row r of a tile, a tile of one row. So the keys of a row are asked
/// for in turn.
struct BiasAhead {
  const int64_t* rows = nullptr;  // where each row of those asked for with a tile begins
  const char* from = nullptr;
  int64_t keys = 0;  // that there are

  template <DType kDType>
  HWY_INLINE void ask(int64_t r) const {
    constexpr int64_t kSize = kBiasBytes<kDType>;
    const int64_t key = r % kChunk * kBc;
    if (key >= keys) return;
    const char* const at = from + (rows[r / kChunk] + key) * kSize;
    FULGUR_UNROLL for (int64_t byte = 0; byte < kBc * kSize; byte += 64) {
      __builtin_prefetch(at + byte, 0, 2);
    }
  }
};

/// What is added to the scores of a key tile, vector v of row r: nothing,
struct NoRowBias {
  HWY_INLINE V32 add(V32 score, int64_t /*r*/, int64_t /*v*/) const { return score; }
  /// The lanes that it hides.
  __mmask16 hides(int64_t /*r*/, int64_t /*v*/) const { return 0; }
  /// With each row, of what is added later.
  void ask(int64_t /*r*/) const {}
};
/// or `factor` times a bias.
template <DType kDType>
struct RowBias {
  const BiasRows rows;
  const float factor;
  const BiasAhead ahead;

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
  HWY_INLINE void ask(int64_t r) const { ahead.ask<kDType>(r); }

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
  /// The bf16 of a half of a vector.
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

/// P = 2^(factor S - shift) of a key tile, packed for tiles of so many steps a block, or not, and
/// l_next = l + its sums, of which this returns the largest, as bits; needs Flushing. A step of the
/// products is made with each kTurns rows.
template <int kParts, int kTurns, class To, class Products, class Bias>
HWY_INLINE hn::Vec<U32> biased_probabilities(int64_t rows, float factor,
                                             const float* HWY_RESTRICT S,
                                             const float* HWY_RESTRICT shift, To* HWY_RESTRICT P,
                                             int64_t steps, const float* HWY_RESTRICT l,
                                             float* HWY_RESTRICT l_next, Products& products,
                                             Bias bias) {
  constexpr int kVectors = kBc / kLanes;
  static_assert(kVectors == 4 && kRowsTogether % kTurns == 0);
  const F32 f;
  const V32 c = hn::Set(f, factor);
  auto most = hn::Zero(U32());
  for (int64_t first = 0; first < rows; first += kRowsTogether) {
    To* const to = P + (std::is_same_v<To, float> ? first * kBc : place_of_row(first, steps));
    V32 sum[kRowsTogether];
    FULGUR_UNROLL for (int i = 0; i < kRowsTogether; ++i) {
      products.template turn<kTurns>(i % kTurns);
      const int64_t r = first + i;
      bias.ask(r);
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
    most = hn::Max(hn::BitCast(U32(), sums), most);  // no sum is negative, and NaN above all
  }
  return most;
}

/// Dropout of P [rows][kBc], as drop() makes it.
HWY_INLINE void drop_rows(const kernels::DropoutMask& mask, float keep_scale, const Panel& panel,
                          const KeyTile& tile, int64_t rows, float* HWY_RESTRICT P) {
  static_assert(kernels::kDropoutKeys * kLanes == kBc);
  const F32 f;
  const U32 u;
  const auto first = static_cast<uint32_t>((panel.dropout_key + tile.j) / kernels::kDropoutKeys);
  for (int64_t r = 0; r < rows; ++r) {
    hn::Vec<U32> words[kernels::kDropoutKeys] = {hn::Iota(u, first), hn::Set(u, panel.query[r]),
                                                 hn::Set(u, panel.head_lo[r]),
                                                 hn::Set(u, panel.head_hi[r])};
    random_words(mask.key, words);
    uint64_t kept = 0;  // a bit a key: word w of each number is that of every fourth key
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

/// One call.
template <class Products, int kParts>
class BiasedForward {
 public:
  BiasedForward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                float* scratch)
      : task_(task),
        p_(task.problem),
        args_(args),
        plain_(plain_scores(p_)),
        factor_(plain_ ? query_factor(p_) : 1),
        bias_factor_(static_cast<float>(plain_ ? 1 / p_.scale : kLog2e)),
        arena_(scratch),
        s_(p_, arena_) {
    for (int64_t row = row_begin; row < row_end; row += kTilePanelRows, ++count_) {
      Panel& panel = panels_[count_];
      make_panel(task, row, std::min(row_end, row + kTilePanelRows), &panel);
      tiles_[count_] = panel.mask.tiles({0, task.s.sk});
      Census census;
      pack_rows<kParts>(query_rows(task, args.q, p_.q, p_.d, row, panel.count), panel.width(),
                        s_.Q[count_], &census);
      moderate_[count_] = census.moderate();
      std::fill_n(s_.m[count_], kTilePanelRows, -std::numeric_limits<float>::infinity());
      l_[count_] = s_.l[count_];
      std::fill_n(l_[count_], kTilePanelRows * kSums, 0.0f);
      fresh_[count_] = true;
      steady_[count_] = false;
      begun_[count_] = false;
    }
    for (int64_t r = 0; r < kTilePanelRows; ++r) row_in_memory_[r] = r * kBc;
  }

  void run() {
    constexpr int64_t kKeys = kChunk * kBc;
    for (int64_t j = next(); j != KeyTiles::kEnd; j = next()) {
      chunk_ = j / kKeys * kKeys;
      std::fill_n(packed_, kChunk, false);
      walk(chunk_ + kKeys);
    }
  }

  /// O = O / l and LSE = ln 2 (m + log2 l) (Alg. 1, lines 12 to 15).
  void finish(int64_t row_begin) {
    const F32 f;
    for (int64_t i = 0; i < count_; ++i) {
      begin_sums(i);
      RowWalk walk(task_, row_begin + i * kTilePanelRows);
      for (int64_t r = 0; r < panels_[i].count; ++r, walk.next()) {
        float l = 0;
        for (int64_t k = 0; k < kSums; ++k) l += *sum_of(l_[i], r, k);
        const RowEnd end = end_row(task_, row_begin + i * kTilePanelRows + r, s_.m[i][r], l);
        const V32 scale = hn::Set(f, l == 0 ? 0 : end.weight / l);
        for (int64_t v = 0; v < columns_; ++v) {
          hn::Store(hn::Mul(hn::Load(f, s_.O[i] + place_of(r, v)), scale), f, s_.row + v * kLanes);
        }
        store_row(args_.out.dtype, s_.row, p_.dv, address(args_.out, walk.offset(p_.out)));
        if (p_.has(Arg::kLse)) static_cast<float*>(args_.lse.data)[walk.offset(p_.lse)] = end.lse;
      }
    }
  }

 private:
  /// Sum k of row r.
  static float* sum_of(float* sums, int64_t r, int64_t k) {
    return sums + r / kRowsTogether * kLanes + k * kRowsTogether + r % kRowsTogether;
  }

  /// A row keeps its maximum until a sum of P of a tile is more: then tiles need not be searched
  /// for theirs.
  static constexpr float kMaxSum = 256;

  /// A key tile that panel i visits, its place in the chunk, and its bias, if it has one.
  struct Visit {
    int64_t i, place;
    KeyTile tile;
    BiasRows bias;
    DType bias_dtype = DType::kF32;
  };
  /// P of panel i and steps [begin, end) of the chunk's keys, to be multiplied by V for the tiles
  /// of columns of O from `column` on, and added to what there is of it.
  struct Packed {
    uint16_t* P = nullptr;
    int64_t i = 0, begin = 0, end = 0;
    bool add = false;
    int64_t column = 0;
  };

  /// The first tile that a panel has yet to visit.
  int64_t next() const {
    int64_t j = KeyTiles::kEnd;
    for (int64_t i = 0; i < count_; ++i) j = std::min(j, tiles_[i].tile().j);
    return j;
  }

  /// The next visit of panel i or one after it, up to key `end`.
  Visit visit(int64_t i, int64_t end) {
    for (; i < count_; ++i) {
      for (; tiles_[i].tile().j < end; tiles_[i].next()) {
        Visit at{i, 0, tiles_[i].tile(), BiasRows()};
        if (p_.has(Arg::kBias) && !with_bias_dtype(p_.bias.dtype, [&](auto dtype) {
              return find_bias<decltype(dtype)::value>(&at);
            })) {
          continue;
        }
        at.place = place(at.tile);
        return at;
      }
    }
    return {i, 0, KeyTile(), BiasRows()};
  }

  /// Finds the bias of a tile while that of the visit before is in use; whether some row sees some
  /// key in spite of it, as far as is known at once.
  template <DType kDType>
  HWY_NOINLINE bool find_bias(Visit* at) {
    const Panel& panel = panels_[at->i];
    const BiasRows rows(task_.given.bias.data, p_.bias, panel, at->tile.j);
    const bool lies = !panel.shares_bias && at->tile.n == kBc && rows.dense(kDType);
    BiasOfTile is;
    if (lies) {
      const auto uniform = uniform_tile<kDType>(rows, panel.width());
      if (!uniform) {
        at->bias = rows;
        at->bias_dtype = kDType;
        return true;
      }
      is = *uniform;
    } else {
      float* const memory = s_.bias[spare_bias_];
      is = load_bias_rows<kDType>(rows, panel.shares_bias ? 1 : panel.width(), at->tile.n, memory);
      if (!is.is_zero) at->bias = BiasRows(memory, panel.shares_bias ? same_row_ : row_in_memory_);
      spare_bias_ = 1 - spare_bias_;
    }
    return !is.hides_all;
  }

  /// Whether the scores of a visit need no more than its bias, which is added while the
  /// exponentials are made. It may hide keys then: no score or maximum is so large that its P would
  /// not be 0.
  bool adds_bias(const Visit& at) const {
    return at.bias.given() && plain_ && p_.dropout_p == 0 && factor_ < kMostFactor &&
           !at.tile.partial && at.tile.n == kBc && steady_[at.i] && moderate_[at.i] &&
           keys_[at.place].moderate() && values_[at.place].finite() &&
           !values_[at.place].denormal();
  }

  /// The bias that is asked for with a visit: of the chunk and the next panel, or of the next chunk
  /// and the first panel.
  BiasAhead bias_ahead(const Visit& at) const {
    if (p_.bias.key != 1 || panels_[at.i].shares_bias) return {};
    const bool last = at.i + 1 == count_;
    const int64_t next = last ? 0 : at.i + 1, j = chunk_ + (last ? kChunk * kBc : 0);
    return {panels_[next].bias_row + at.place * (kTilePanelRows / kChunk),
            static_cast<const char*>(task_.given.bias.data) + j * size_of(p_.bias.dtype),
            panels_[next].mask.end() - j};
  }
  void ask_for_bias(const Visit& at) const {
    with_bias_dtype(p_.bias.dtype, [ahead = bias_ahead(at)](auto dtype) HWY_ATTR {
      for (int64_t r = 0; r < kTilePanelRows; ++r) ahead.template ask<decltype(dtype)::value>(r);
    });
  }

  /// All panels over their tiles up to key `end`. While P of a tile is made from its scores, those
  /// of the next tile are multiplied, and P of the group before by V.
  void walk(int64_t end) {
    const int64_t most = group_of(p_.dv);
    const int64_t share = 2 * ((columns_ + 2 * most - 1) / (2 * most));  // of O, of a tile
    float *S = s_.S[0], *S_next = s_.S[1];
    uint16_t *P = s_.P[0], *P_before = s_.P[1];
    Packed before, now;
    int64_t grouped = 0;  // tiles of this group
    const Flushing on(true);
    Visit at = visit(0, end);
    if (at.i == count_) return;
    products_.multiply(scores(at, S));
    products_.flush();
    while (at.i < count_) {
      tiles_[at.i].next();
      const Visit later = visit(at.i, end);
      if (grouped == 0) {
        const int64_t step = at.place * kTileSteps;
        now = {P, at.i, step, step, begun_[at.i]};
      }
      ++grouped;
      // The keys of a group follow each other.
      const bool last = grouped == most || later.i != at.i || later.place != at.place + 1;
      const Product next = later.i < count_ ? scores(later, S_next) : Product();
      const Product add = values(last ? columns_ : std::min(columns_, grouped * share), &before);
      products_.put_off(next);
      products_.put_off(add);
      probabilities(at, S, &before, &now);
      if (add.rows == 0) products_.flush();  // nothing else has stored the scores
      if (last) {
        before = now;
        begun_[at.i] |= now.begin < now.end;
        std::swap(P, P_before);
        grouped = 0;
      }
      std::swap(S, S_next);
      at = later;
    }
    products_.multiply(values(columns_, &before));
    products_.flush();
  }

  /// The place of a key tile in the chunk; packs it for the first panel that asks.
  int64_t place(const KeyTile& tile) {
    const int64_t at = (tile.j - chunk_) / kBc;
    if (packed_[at]) return at;
    packed_[at] = true;
    keys_[at] = values_[at] = Census();
    pack_columns<kParts>(key_rows(task_, args_.k, p_.k, p_.d, tile.j, tile.n), tile.n, s_.K[at],
                         &keys_[at]);
    for (int64_t s = 0; s < steps_of(tile.n); ++s) {
      const int64_t key = s * kTileDepth;
      pack_pairs<kParts, kTilePairs>(
          key_rows(task_, args_.v, p_.v, p_.dv, tile.j + key, std::min(kTileDepth, tile.n - key)),
          at * kTileSteps + s, kChunkSteps, s_.V, &values_[at], [] {});
    }
    return at;
  }

  /// Rows of panel i whose P is made.
  int64_t rows_of(int64_t i) const { return round_up(panels_[i].count, kRowsTogether); }

  /// S = Q K^T.
  Product scores(const Visit& at, float* S) {
    const int64_t steps = kParts * steps_of(p_.d), count = panels_[at.i].count;
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

  /// O += P V for tiles of columns up to `end`.
  Product values(int64_t end, Packed* p) {
    if (p->begin == p->end || p->column >= end) return {};
    const int64_t keys = std::min(task_.s.sk - chunk_, p->end * kTileDepth) - p->begin * kTileDepth;
    // A part of a step has a pair for each key of its first half.
    const int64_t depth =
        keys / kTileDepth * kTileDepth + std::min(kTileDepth, keys % kTileDepth * 2);
    const int64_t column = std::exchange(p->column, end), count = panels_[p->i].count;
    return {p->add,
            blocks_of(count),
            end - column,
            kParts * (p->end - p->begin),
            Operand::packed(p->P, group_steps_),
            {Operand::packed(s_.V, kParts * kChunkSteps).at(column, kParts * p->begin), 64,
             kParts * kChunkSteps * kTileSize, kTileSize},
            s_.O[p->i] + column * kTileColumn,
            kLanes,
            {count, std::min(p_.dv, end * kTileRows) - column * kTileRows, depth},
            true};
  }

  /// S -> P of a tile, the next of group `now`, while the products under way are made.
  void probabilities(const Visit& at, float* S, Packed* before, Packed* now) {
    const F32 f;
    const int64_t i = at.i, rows = rows_of(i);
    const KeyTile& tile = at.tile;
    const bool adds = adds_bias(at);
    if (!adds) {
      if (p_.has(Arg::kBias)) ask_for_bias(at);
      finish_scores(at, S);
    }
    // Only rows that see a key take part in what is not finite, and tiles take denormal numbers
    // for 0.
    const Census& values = values_[at.place];
    const bool by_tiles = adds || (!values.denormal() && (values.finite() || !hides_));
    const bool packed = by_tiles && p_.dropout_p == 0;
    uint16_t* P = now->P + kParts * (now->end - now->begin) * kTileSize;
    const int64_t steps = products_.left();
    if (fresh_[i]) start_maxima(i, S);
    const auto make = [&](auto turns, auto* to, const auto& bias) HWY_ATTR {
      const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
      for (int64_t r = 0; r < kTilePanelRows; r += kLanes) {
        // A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives P = 0.
        const V32 m = hn::Load(f, s_.m[i] + r);
        hn::Store(hn::IfThenZeroElse(hn::Eq(m, none), m), f, shift_ + r);
      }
      return biased_probabilities<kParts, decltype(turns)::value>(
          rows, factor_, S, shift_, to, group_steps_, l_[i], spare_l_, products_, bias);
    };
    // With the turns of the steps that are left, as a constant.
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
    const auto most =
        !adds ? of_scores() : with_bias_dtype(at.bias_dtype, [&](auto dtype) HWY_ATTR {
          return by_steps(RowBias<decltype(dtype)::value>{at.bias, bias_factor_, bias_ahead(at)});
        });
    products_.finish();
    const U32 u;
    if (!hn::AllFalse(u, hn::Gt(most, hn::BitCast(u, hn::Set(f, kMaxSum)))) && some_outgrown(i)) {
      if (adds) finish_scores(at, S);
      add_now(before, now);
      P = now->P;
      raise_maxima(i, S);
      of_scores();
    }
    std::swap(l_[i], spare_l_);
    if (!by_tiles) add_now(before, now);
    now->end += steps_of(tile.n);
    if (packed) return;
    if (p_.dropout_p > 0) {
      const auto keep_scale = static_cast<float>(1 / (1 - p_.dropout_p));
      drop_rows(task_.given.dropout, keep_scale, panels_[i], tile, rows, s_.P_wide);
    }
    if (by_tiles) return pack_probabilities(rows, P);
    now->begin = now->end;
    add_by_vectors(i, tile);
  }

  /// P_wide as A.
  void pack_probabilities(int64_t rows, uint16_t* P) const {
    const F32 f;
    for (int64_t r = 0; r < rows; ++r) {
      V32 p[kBc / kLanes];
      FULGUR_UNROLL for (int64_t v = 0; v < kBc / kLanes; ++v) {
        p[v] = hn::Load(f, s_.P_wide + r * kBc + v * kLanes);
      }
      store_probabilities<kParts>(p, P + place_of_row(r, group_steps_));
    }
  }

  /// Adds to O what waits, since it is changed otherwise next.
  HWY_NOINLINE void add_now(Packed* before, Packed* now) {
    products_.multiply(values(columns_, before));
    products_.multiply(values(columns_, now));
    products_.flush();
    begun_[now->i] |= now->begin < now->end;
    begin_sums(now->i);
    *now = {now->P, now->i, now->end, now->end, true};
  }

  /// Sums that nothing has been added to.
  void begin_sums(int64_t i) {
    if (begun_[i]) return;
    begun_[i] = true;
    std::fill_n(s_.O[i], columns_ * kTileColumn, 0.0f);
  }

  /// Turns the products of a visit into scores, its bias among them, and finds what each row sees.
  void finish_scores(const Visit& at, float* S) {
    const Panel& panel = panels_[at.i];
    const KeyTile& tile = at.tile;
    const int64_t rows = rows_of(at.i);
    hides_ = false;
    if (plain_ && !at.bias.given() && !tile.partial && tile.n == kBc) {
      std::fill_n(seen_, rows, ~uint64_t{0});
      return;
    }
    const Flushing off(false);  // large softcaps make small numbers of scores
    if (!plain_) {
      scale_scores(kTilePanelRows, kBc, query_factor(p_), S);
      if (p_.softcap > 0) softcap_scores(p_, kBc / kLanes, kTilePanelRows, S, kBc, nullptr);
      if (p_.has(Arg::kAlibiSlopes)) alibi_rows(panel, tile, rows, S);
    }
    if (!at.bias.given()) return hide_rows(panel, tile, rows, NoRowBias(), S);
    with_bias_dtype(at.bias_dtype, [&](auto dtype) {
      hide_rows(panel, tile, rows, RowBias<decltype(dtype)::value>{at.bias, bias_factor_, {}}, S);
    });
  }

  /// S - alibi |distance of the row's diagonal from the key|.
  HWY_NOINLINE static void alibi_rows(const Panel& panel, const KeyTile& tile, int64_t rows,
                                      float* HWY_RESTRICT S) {
    const F32 f;
    for (int64_t r = 0; r < rows; ++r) {
      const V32 slope = hn::Set(f, panel.slope[r]);
      const V32 diagonal = hn::Set(f, static_cast<float>(panel.diagonal[r] - tile.j));
      for (int64_t v = 0; v < kBc / kLanes; ++v) {
        float* const at = S + place_of(r, v);
        const auto key = static_cast<float>(v * kLanes);
        const V32 distance = hn::Abs(hn::Sub(diagonal, hn::Iota(f, key)));
        hn::Store(hn::NegMulAdd(slope, distance, hn::Load(f, at)), f, at);
      }
    }
  }

  /// -inf for the scores of keys that a row does not see; adds the bias to the others.
  template <class Bias>
  HWY_NOINLINE void hide_rows(const Panel& panel, const KeyTile& tile, int64_t rows,
                              const Bias& bias, float* HWY_RESTRICT S) {
    const F32 f;
    const uint64_t all = ~uint64_t{0} >> (kBc - tile.n);
    for (int64_t r = 0; r < rows; ++r) {
      seen_[r] = tile.partial ? panel.mask.keys_of(r, tile) : all;
      for (int64_t v = 0; v < kBc / kLanes; ++v) {
        seen_[r] &= ~(uint64_t{bias.hides(r, v)} << v * kLanes);
        const auto seen = static_cast<__mmask16>(seen_[r] >> v * kLanes);
        float* const at = S + place_of(r, v);
        const V32 score = bias.add(hn::Load(f, at), r, v);
        const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        hn::Store(V32{_mm512_mask_mov_ps(none, seen, score.raw)}, f, at);
      }
      hides_ |= seen_[r] != all;
    }
  }

  /// The maxima of the rows of a tile, from row r on.
  HWY_INLINE V32 highest(const float* HWY_RESTRICT S, int64_t r) const {
    const F32 f;
    __m512i most[kLanes];
    FULGUR_UNROLL for (int64_t i = 0; i < kLanes; ++i) {
      V32 of_row = hn::Load(f, S + place_of(r + i, 0));
      FULGUR_UNROLL for (int64_t v = 1; v < kBc / kLanes; ++v) {
        of_row = hn::Max(of_row, hn::Load(f, S + place_of(r + i, v)));
      }
      most[i] = _mm512_castps_si512(of_row.raw);
    }
    transpose_16(most);
    V32 rows{_mm512_castsi512_ps(most[0])};
    FULGUR_UNROLL for (int i = 1; i < kLanes; ++i) {
      rows = hn::Max(rows, V32{_mm512_castsi512_ps(most[i])});
    }
    return hn::Mul(rows, hn::Set(f, factor_));
  }

  /// The maxima of the rows that have seen no key yet.
  HWY_NOINLINE void start_maxima(int64_t i, const float* S) {
    const F32 f;
    const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
    fresh_[i] = false;
    steady_[i] = true;
    for (int64_t r = 0; r < panels_[i].count; r += kLanes) {
      float* const m = s_.m[i] + r;
      const V32 old = hn::Load(f, m);
      const V32 now = hn::IfThenElse(hn::Eq(old, none), highest(S, r), old);
      hn::Store(now, f, m);
      const auto there = hn::FirstN(f, static_cast<size_t>(panels_[i].count - r));
      fresh_[i] |= !hn::AllFalse(f, hn::And(there, hn::Eq(now, none)));
      const auto moderate = hn::Lt(hn::Abs(now), hn::Set(f, kModerate));
      steady_[i] &= hn::AllTrue(f, hn::Or(hn::Not(there), moderate));
    }
  }

  /// Whether row r has outgrown its maximum with the sums of P that were added last.
  HWY_INLINE bool outgrown(int64_t i, int64_t r) const {
    bool any = false;
    for (int64_t k = 0; k < kSums; ++k) {
      any |= *sum_of(spare_l_, r, k) - *sum_of(l_[i], r, k) > kMaxSum;
    }
    return any;
  }
  HWY_NOINLINE bool some_outgrown(int64_t i) const {
    bool any = false;
    for (int64_t r = 0; r < panels_[i].count; ++r) any |= outgrown(i, r);
    return any;
  }

  /// New maxima of the rows that have outgrown theirs; rescales their l and O (Alg. 1, lines 9 and
  /// 10).
  HWY_NOINLINE void raise_maxima(int64_t i, const float* S) {
    const F32 f;
    const Flushing off(false);  // what V has below 2^-126 stays
    HWY_ALIGN float most[kTilePanelRows];
    for (int64_t r = 0; r < kTilePanelRows; r += kLanes) hn::Store(highest(S, r), f, most + r);
    for (int64_t r = 0; r < panels_[i].count; ++r) {
      if (!outgrown(i, r)) continue;
      float& m = s_.m[i][r];
      const float old = std::exchange(m, most[r]);
      const float alpha = hn::GetLane(exp2_short(hn::Set(f, old - m)));
      for (int64_t k = 0; k < kSums; ++k) *sum_of(l_[i], r, k) *= alpha;
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
    for (int64_t r = 0; r < panels_[i].count; ++r) {
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

  const Task& task_;
  const Problem& p_;
  const ForwardArgs& args_;
  const bool plain_;
  const float factor_;                        // of the softmax
  const float bias_factor_;                   // of a bias that is added to products, or to scores
  const int64_t columns_ = blocks_of(p_.dv);  // of tiles of O
  const int64_t group_steps_ = kParts * group_of(p_.dv) * kTileSteps;
  Arena arena_;
  const BiasedForwardScratch<kParts> s_;
  const typename Products::Session session_;
  Products products_;
  Panel panels_[kTilePanels];
  KeyTiles tiles_[kTilePanels];  // that each panel has yet to visit
  float* l_[kTilePanels];        // of s_.l
  float* spare_l_ = s_.l[kTilePanels];
  bool fresh_[kTilePanels];     // some row has seen no key yet
  bool steady_[kTilePanels];    // each row has a maximum of moderate size
  bool moderate_[kTilePanels];  // Q is
  bool begun_[kTilePanels];     // O holds something
  int64_t count_ = 0;
  int64_t spare_bias_ = 0;                       // of s_.bias
  int64_t row_in_memory_[kTilePanelRows];        // where rows of s_.bias begin
  const int64_t same_row_[kTilePanelRows] = {};  // or where all do, if they are one
  int64_t chunk_ = 0;                            // its first key
  bool packed_[kChunk];                          // its tiles
  Census keys_[kChunk], values_[kChunk];         // of K and V
  HWY_ALIGN float shift_[kTilePanelRows];        // what scores lose, of a tile
  uint64_t seen_[kTilePanelRows];                // the keys of it that each row sees
  bool hides_ = false;                           // some row does not see some of them
};

/// Whether rows of a panel may differ in their bias.
inline bool has_bias_of_rows(const Problem& p) {
  return p.has(Arg::kBias) && (p.bias.row != 0 || (p.bias.head != 0 && p.hq != p.hk));
}

/// tile_forward() or this, by the bias; TileProducts stream A or B, as it wants them.
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
  return has_bias_of_rows(p) ? biased_forward_scratch<kParts>(p) : tile_forward_scratch<kParts>(p);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
