// FlashAttention-2 forward (Alg. 1) of bf16 and f16 on tiles or by dot products: S^T = K Q^T and
// O^T += V^T P^T, as in forward-inl.h, a query row in each lane of the sums. Two rows of P^T,
// rounded and merged, are a row of the second product's B.
#if defined(FULGUR_CPU_TILE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_TILE_FORWARD_INL_H_
#undef FULGUR_CPU_TILE_FORWARD_INL_H_
#else
#define FULGUR_CPU_TILE_FORWARD_INL_H_
#endif

#include <type_traits>
#include <utility>

#include "cpu/kernels/bf16/amx-inl.h"
#include "cpu/kernels/simd/forward-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kTilePanelRows = 2 * kTileRows;
constexpr int64_t kTilePanels = 32;      // of a block
constexpr int64_t kAmxPackingRows = 64;  // see Kernels::packing_rows

/// Key tiles that are packed for all panels of a block. A panel walks over them while its O stays
/// in the L1 cache.
constexpr int64_t kChunk = 8;

constexpr int64_t kTileSteps = kBc / kTileDepth, kChunkSteps = kChunk * kTileSteps;

/// Key tiles of a group, whose P is kept. With each of the next group, a block of rows of O^T
/// takes all of it, so that sums are loaded and stored once a group.
constexpr int64_t group_of(int64_t dv) { return std::min(kChunk, (blocks_of(dv) + 1) / 2); }

/// The row block and a chunk of the keys in fast memory.
template <int kParts>
struct TileForwardScratch {
  uint16_t* Q[kTilePanels];                // columns of B, summed over d
  float* Ot[kTilePanels];                  // [dv in tiles][width]
  float *m[kTilePanels], *l[kTilePanels];  // [width]
  uint16_t* K[kChunk];                     // rows of A, summed over d
  uint16_t* Vt;                            // rows of A, summed over the keys of the chunk
  float* S[2];                             // [kBc][width], of a key tile and the next
  uint16_t* P[2];  // steps [kParts][kTileDepth / 2][width][2]: B, summed over keys; of a group and
                   // the one before
  float* P_wide;   // [kBc][width]: P that is not ready for tiles
  float* bias[2];  // [kBc][width]: of the tile at hand and of the next
  float* V;        // [kBc][dv in tiles]

  TileForwardScratch(const Problem& p, Arena& arena) {
    const int64_t d = kParts * steps_of(p.d) * kTileDepth, dv = blocks_of(p.dv) * kTileRows;
    for (int64_t i = 0; i < kTilePanels; ++i) {
      Q[i] = arena.take_halves(kTilePanelRows * d);
      Ot[i] = arena.take(dv * kTilePanelRows);
      m[i] = arena.take(kTilePanelRows);
      l[i] = arena.take(kTilePanelRows);
    }
    for (uint16_t*& tile : K) tile = arena.take_halves(kBc * d);
    Vt = arena.take_halves(kParts * kChunk * kBc * dv);
    for (float*& tile : S) tile = arena.take(kBc * kTilePanelRows);
    for (uint16_t*& packed : P) {
      packed = arena.take_halves(kParts * group_of(p.dv) * kBc * kTilePanelRows);
    }
    P_wide = arena.take(kBc * kTilePanelRows);
    V = arena.take(kBc * dv);
    for (float*& tile : bias) tile = take_bias_tile(p, arena);
  }
};

template <int kParts>
int64_t tile_forward_scratch(const Problem& p) {
  Arena arena(nullptr);
  TileForwardScratch<kParts>(p, arena);
  return arena.used();
}

/// Where the keys of some tiles lie in K or V.
struct KeyAddresses {
  const char* at[kTiles * kBc];

  KeyAddresses(const Task& task, const ConstTensor& t, const Layout& layout, int64_t j, int64_t n) {
    key_addresses(task, t, layout, j, n, at);
  }
};

/// Keys [j, j + n) of K or V of a task.
inline auto key_rows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                     int64_t j, int64_t n) {
  return Rows{[keys = KeyAddresses(task, t, layout, j, n)](int64_t i) {
                return reinterpret_cast<const uint16_t*>(keys.at[i]);
              },
              n, dim};
}

/// Where the rows of a panel lie in q or dout.
struct PanelRows {
  const uint16_t* at[kTilePanelRows];

  PanelRows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t row, int64_t n) {
    RowWalk walk(task, row);
    for (int64_t i = 0; i < n; ++i, walk.next()) {
      at[i] = static_cast<const uint16_t*>(t.data) + walk.offset(layout);
    }
  }
};

/// Rows [row, row + n) of q or dout of a task.
inline auto query_rows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                       int64_t row, int64_t n) {
  return Rows{[rows = PanelRows(task, t, layout, row, n)](int64_t i) { return rows.at[i]; }, n,
              dim};
}

/// S = factor S: what the score rules expect, where Q could not be scaled without rounding.
HWY_INLINE void scale_scores(int64_t n, int64_t width, float factor, float* HWY_RESTRICT S) {
  const F32 f;
  for (int64_t i = 0; i < n * width; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(f, S + i), hn::Set(f, factor)), f, S + i);
  }
}

/// Whether a mask and the factor of the softmax are all that scores differ from products by, which
/// take a bias.
inline bool plain_scores(const Problem& p) { return only_scales(p) && query_factor(p) > 0; }

/// Where P of keys jj and jj + 1 of a key tile stands in its steps.
template <int kParts>
HWY_INLINE int64_t place_of_pair(int64_t jj, int64_t width) {
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
                              to + place_of_pair<kParts>(jj, width) + 2 * c);
    }
  }
}

/// The maxima of the scores factor S of a key tile.
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

/// Scores up to this size are far from those of keys that a bias hides, and from overflow: those of
/// operands of moderate size (Census), with a factor of the softmax below this.
constexpr float kModerate = 0x1p100f, kMostFactor = 0x1p10f;

/// What is added to the score of key jj and vector v: nothing,
struct NoBias {
  HWY_INLINE V32 add(V32 score, int64_t /*jj*/, int64_t /*v*/) const { return score; }
};
/// or `factor` times a bias of keys, in memory.
struct KeyBias {
  const float* keys;
  float factor;

  HWY_INLINE V32 add(V32 score, int64_t jj, int64_t) const {
    const F32 f;
    return hn::MulAdd(hn::Set(f, keys[jj]), hn::Set(f, factor), score);
  }
};

/// P = 2^(factor S - m) of a key tile, packed for tiles or not, and its sums; needs Flushing. A
/// step of the products is made with each kTurns pairs of keys.
template <int kParts, int kVectors, int kTurns, class To, class Products, class Bias>
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
  for (int64_t begin = 0; begin < kBc; begin += 2 * kTurns) {
    FULGUR_UNROLL for (int pair = 0; pair < kTurns; ++pair) {
      products.template turn<kTurns>(pair);
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
                                  P + place_of_pair<kParts>(jj, kWidth) + 2 * lane);
        }
      }
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) sum[v] = total[v];
}

/// O^T [dv][width] = O^T diag(alpha).
HWY_INLINE void rescale(const Panel& panel, int64_t dv, const float* HWY_RESTRICT alpha,
                        float* HWY_RESTRICT Ot) {
  const F32 f;
  for (int64_t v = 0; v < panel.vectors; ++v) {
    const V32 a = hn::Load(f, alpha + v * kLanes);
    if (hn::AllTrue(f, hn::Eq(a, hn::Set(f, 1.0f)))) continue;
    for (int64_t c = 0; c < dv; ++c) {
      float* const o = Ot + c * panel.width() + v * kLanes;
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

/// The first `count` rows of C = C^T [columns in tiles][width], scaled lane by lane and rounded, to
/// their places.
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

/// O = O / l and LSE = ln 2 (m + log2 l) of a panel (Alg. 1, lines 12 to 15).
HWY_INLINE void finish_tile_rows(const Task& task, const ForwardArgs& args, int64_t row,
                                 const Panel& panel, const float* HWY_RESTRICT Ot,
                                 const float* HWY_RESTRICT m, const float* HWY_RESTRICT l) {
  const F32 f;
  const Problem& p = task.problem;
  RowWalk walk(task, row);
  for (int64_t v = 0; v < panel.vectors; ++v) {
    const int64_t count = std::min(kLanes, panel.count - v * kLanes);
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
    store_sums(args.out.dtype, Ot + v * kLanes, p.dv, panel.width(), scale, count, out);
  }
}

/// One call.
template <class Products, int kParts>
class TileForward {
 public:
  TileForward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
              float* scratch)
      : task_(task),
        p_(task.problem),
        args_(args),
        plain_(plain_scores(p_)),
        factor_(plain_ ? query_factor(p_) : 1),
        bias_factor_(static_cast<float>(1 / p_.scale)),
        arena_(scratch),
        s_(p_, arena_) {
    for (int64_t row = row_begin; row < row_end; row += kTilePanelRows, ++count_) {
      Panel& panel = panels_[count_];
      make_panel(task, row, std::min(row_end, row + kTilePanelRows), &panel);
      tiles_[count_] = panel.mask.tiles({0, task.s.sk});
      Census census;
      pack_columns<kParts>(query_rows(task, args.q, p_.q, p_.d, row, panel.count), panel.width(),
                           s_.Q[count_], &census);
      moderate_[count_] = census.moderate();
      std::fill_n(s_.m[count_], panel.width(), -std::numeric_limits<float>::infinity());
      std::fill_n(s_.l[count_], panel.width(), 0.0f);
      fresh_[count_] = true;
      steady_[count_] = false;
      begun_[count_] = false;
    }
    std::fill_n(alpha_, kTilePanelRows, 1.0f);
  }

  void run() {
    constexpr int64_t kKeys = kChunk * kBc;
    for (int64_t j = next(); j != KeyTiles::kEnd; j = next()) {
      chunk_ = j / kKeys * kKeys;
      std::fill_n(packed_, kChunk, false);
      walk(chunk_ + kKeys);
    }
  }

  void finish(int64_t row_begin) {
    for (int64_t i = 0; i < count_; ++i) {
      begin_sums(i);
      finish_tile_rows(task_, args_, row_begin + i * kTilePanelRows, panels_[i], s_.Ot[i], s_.m[i],
                       s_.l[i]);
    }
  }

 private:
  /// A row keeps its maximum until P of a key tile sums up to more: then tiles need not be searched
  /// for theirs.
  static constexpr float kMaxSum = 256;

  /// A key tile that panel i visits, and its place in the chunk.
  struct Visit {
    int64_t i, place;
    KeyTile tile;
    // Of the tile: memory for its bias, those of the panel, and what hides keys.
    float* memory = nullptr;
    const float *bias = nullptr, *hiding = nullptr;
    int64_t bias_step = 0;
    const void* bias_rows = nullptr;
  };
  /// P of panel i and steps [begin, end) of the chunk's keys, to be multiplied by V for the tiles
  /// of rows of O^T from `row` on, and added to what there is of it.
  struct Packed {
    uint16_t* P = nullptr;
    int64_t i = 0, begin = 0, end = 0;
    bool add = false;
    int64_t row = 0;
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
        Visit at{i, 0, tiles_[i].tile()};
        if (p_.has(Arg::kBias) && !take_bias(&at)) continue;
        at.place = place(at.tile);
        return at;
      }
    }
    return {i, 0, KeyTile()};
  }

  /// Finds the bias of a tile while that of the visit before is in use; whether some row sees some
  /// key in spite of it.
  bool take_bias(Visit* at) {
    Panel& panel = panels_[at->i];
    at->memory = s_.bias[spare_bias_];
    if (!load_bias(task_, at->tile, false, at->memory, &panel)) return false;
    spare_bias_ = 1 - spare_bias_;
    at->bias = panel.bias;
    at->bias_step = panel.bias_step;
    at->bias_rows = panel.bias_rows;
    at->hiding = panel.mask.hides() ? at->memory : nullptr;
    return true;
  }

  /// Whether the bias of a visit, one of keys, is added while the exponentials are made. It may
  /// hide keys then: no score or maximum is so large that its P would not be 0.
  bool adds_bias(const Visit& at) const {
    return at.bias != nullptr && at.bias_step == 0 && plain_ && panels_[at.i].vectors == 2 &&
           p_.dropout_p == 0 && factor_ < kMostFactor && !at.tile.partial && at.tile.n == kBc &&
           steady_[at.i] && moderate_[at.i] && keys_[at.place].moderate() &&
           values_[at.place].finite() && !values_[at.place].denormal();
  }

  /// All panels over their tiles up to key `end`. While P of a tile is made from its scores, those
  /// of the next tile are multiplied, and P of the group before by V.
  void walk(int64_t end) {
    const int64_t blocks = blocks_of(p_.dv), most = group_of(p_.dv);
    const int64_t rows = 2 * ((blocks + 2 * most - 1) / (2 * most));  // a tile's share of O^T
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
      const Product add = values(last ? blocks : std::min(blocks, grouped * rows), &before);
      products_.put_off(next);
      products_.put_off(add);
      if (panels_[at.i].vectors == 1) {
        probabilities<1>(at, S, &before, &now);
      } else {
        probabilities<2>(at, S, &before, &now);
      }
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
    products_.multiply(values(blocks, &before));
    products_.flush();
  }

  /// The place of a key tile in the chunk; packs it for the first panel that asks.
  int64_t place(const KeyTile& tile) {
    const int64_t at = (tile.j - chunk_) / kBc;
    if (packed_[at]) return at;
    packed_[at] = true;
    keys_[at] = values_[at] = Census();
    pack_rows<kParts>(key_rows(task_, args_.k, p_.k, p_.d, tile.j, tile.n), tile.n, s_.K[at],
                      &keys_[at]);
    pack_transposed<kParts>(key_rows(task_, args_.v, p_.v, p_.dv, tile.j, tile.n), tile.n,
                            at * kTileSteps, kChunkSteps, s_.Vt, &values_[at]);
    return at;
  }

  /// S = K Q^T.
  Product scores(const Visit& at, float* S) {
    const int64_t steps = kParts * steps_of(p_.d), vectors = panels_[at.i].vectors;
    return {false,
            blocks_of(at.tile.n),
            vectors,
            steps,
            Operand::packed(s_.K[at.place], steps),
            Operand::packed(s_.Q[at.i], steps),
            S,
            vectors * kLanes,
            {at.tile.n, panels_[at.i].count, p_.d}};
  }

  /// O^T += V^T P^T for tiles of rows up to `end`.
  Product values(int64_t end, Packed* p) {
    if (p->begin == p->end || p->row >= end) return {};
    const int64_t keys = std::min(task_.s.sk - chunk_, p->end * kTileDepth);
    const int64_t vectors = panels_[p->i].vectors, width = vectors * kLanes;
    const int64_t row = std::exchange(p->row, end);
    const Operand Vt = Operand::packed(s_.Vt, kParts * kChunkSteps);
    return {p->add,
            end - row,
            vectors,
            kParts * (p->end - p->begin),
            {Vt.at(row, kParts * p->begin), Vt.stride, Vt.block, Vt.step},
            {p->P, width * 4, kTileDepth, kTileRows * width * 2},
            s_.Ot[p->i] + row * kTileRows * width,
            width,
            {std::min(p_.dv, end * kTileRows) - row * kTileRows, panels_[p->i].count,
             keys - p->begin * kTileDepth},
            true};
  }

  /// Whether the tiles may add P V: only rows that see a key take part in what is not finite, and
  /// tiles take denormal numbers for 0.
  static bool tiles_add(const Census& values, const Panel& panel, const KeyTile& tile) {
    return !values.denormal() && (values.finite() || !panel.mask.hides(tile));
  }

  /// S -> P of a tile, the next of group `now`, while the products under way are made.
  template <int kVectors>
  void probabilities(const Visit& at, float* S, Packed* before, Packed* now) {
    const int64_t i = at.i, width = kVectors * kLanes;
    const KeyTile& tile = at.tile;
    const bool adds = adds_bias(at);
    if (!adds) finish_scores(at, S);
    const bool by_tiles = adds || tiles_add(values_[at.place], panels_[i], tile);
    const bool packed = by_tiles && p_.dropout_p == 0;
    uint16_t* P = now->P + kParts * (now->end - now->begin) * kTileDepth * width;
    const int64_t steps = products_.left();
    if (fresh_[i]) start_maximum<kVectors>(i, S);
    V32 sum[kVectors];
    const float* const m = s_.m[i];
    // Calls make(turns) with the turns of the steps that are left, as a constant.
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
      by_steps([&](auto turns) HWY_ATTR {
        tile_probabilities<kParts, kVectors, turns>(factor_, S, m, P, sum, products_, NoBias());
      });
    };
    if (!adds) {
      of_scores();
    } else if constexpr (kVectors == 2) {
      by_steps([&](auto turns) HWY_ATTR {
        tile_probabilities<kParts, 2, turns>(factor_, S, m, P, sum, products_,
                                             KeyBias{at.bias, bias_factor_});
      });
    }
    products_.finish();
    if (outgrown<kVectors>(sum)) {
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
      drop(task_.given.dropout, keep_scale, panels_[i], tile, width, s_.P_wide, nullptr);
    }
    if (by_tiles) return pack_probabilities<kParts>(width, s_.P_wide, P);
    now->begin = now->end;
    add_by_vectors(i, tile);
  }

  /// Adds to O what waits, since it is changed otherwise next.
  HWY_NOINLINE void add_now(Packed* before, Packed* now) {
    const int64_t blocks = blocks_of(p_.dv);
    products_.multiply(values(blocks, before));
    products_.multiply(values(blocks, now));
    products_.flush();
    begun_[now->i] |= now->begin < now->end;
    begin_sums(now->i);
    *now = {now->P, now->i, now->end, now->end, true};
  }

  /// Sums that nothing has been added to.
  void begin_sums(int64_t i) {
    if (begun_[i]) return;
    begun_[i] = true;
    std::fill_n(s_.Ot[i], blocks_of(p_.dv) * kTileRows * panels_[i].width(), 0.0f);
  }

  /// Turns the products of a visit into scores, its bias among them.
  void finish_scores(const Visit& at, float* S) {
    Panel& panel = panels_[at.i];
    const KeyTile& tile = at.tile;
    panel.bias = at.bias;
    panel.bias_step = at.bias_step;
    panel.bias_rows = at.bias_rows;
    panel.mask.hide(at.hiding, tile.j, at.bias_step);
    panel.bias_memory = at.memory;
    const bool biased = panel.bias != nullptr || panel.bias_rows != nullptr;
    const int64_t width = panel.width(), n = tile.n;
    if (plain_ && !biased && !tile.partial && n == kBc) return;
    const Flushing off(false);  // large softcaps make small numbers of scores
    if (plain_) {
      add_bias(p_, tile, bias_factor_, S, width, &panel);
      hide_scores(panel.mask, panel.vectors, tile, S, width);
    } else {
      scale_scores(n, width, query_factor(p_), S);
      score_rule(p_, tile, S, width, nullptr, &panel);
    }
    std::fill(S + n * width, S + kBc * width, -std::numeric_limits<float>::infinity());
  }

  /// The maximum of the rows that have seen no key yet.
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
  HWY_INLINE bool outgrown(const V32 (&sum)[kVectors]) const {
    const F32 f;
    bool any = false;
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      any |= !hn::AllFalse(f, hn::Gt(sum[v], hn::Set(f, kMaxSum)));
    }
    return any;
  }

  /// A new maximum of the rows that have outgrown theirs; rescales their l and O (Alg. 1, lines 9
  /// and 10).
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
    rescale(panels_[i], p_.dv, alpha_, s_.Ot[i]);
    std::fill_n(alpha_, kTilePanelRows, 1.0f);
  }

  void add_by_vectors(int64_t i, const KeyTile& tile) {
    const Flushing off(false);
    const int64_t ld = blocks_of(p_.dv) * kTileRows;
    load_keys(task_, args_.v, p_.v, p_.dv, tile.j, tile.n, s_.V, ld);
    accumulate_visible(panels_[i], tile, p_.dv, s_.V, ld, s_.P_wide, panels_[i].width(), alpha_,
                       s_.Ot[i]);
  }

  const Task& task_;
  const Problem& p_;
  const ForwardArgs& args_;
  const bool plain_;
  const float factor_;       // of the softmax
  const float bias_factor_;  // of a bias that is added to products
  Arena arena_;
  const TileForwardScratch<kParts> s_;
  const typename Products::Session session_;
  Products products_;
  Panel panels_[kTilePanels];
  KeyTiles tiles_[kTilePanels];  // that each panel has yet to visit
  bool fresh_[kTilePanels];      // some row has seen no key yet
  bool steady_[kTilePanels];     // each row has a maximum of moderate size
  bool moderate_[kTilePanels];   // Q is
  bool begun_[kTilePanels];      // O holds something
  int64_t count_ = 0;
  int64_t spare_bias_ = 0;                 // of s_.bias
  int64_t chunk_ = 0;                      // its first key
  bool packed_[kChunk];                    // its tiles
  Census keys_[kChunk], values_[kChunk];   // of K and V
  HWY_ALIGN float alpha_[kTilePanelRows];  // 1 while no row is rescaled
};

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
