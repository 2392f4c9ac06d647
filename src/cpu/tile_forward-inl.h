// FlashAttention-2 forward (Alg. 1) of bf16 on tiles: S^T = K Q^T and O^T += V^T P^T, as in
// forward-inl.h, a query row in each lane of the sums. Two rows of P^T, rounded and merged, are a
// row of the second product's B.
#if defined(FULGUR_CPU_TILE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_TILE_FORWARD_INL_H_
#undef FULGUR_CPU_TILE_FORWARD_INL_H_
#else
#define FULGUR_CPU_TILE_FORWARD_INL_H_
#endif

#include "cpu/forward-inl.h"
#include "cpu/tile-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kTilePanelRows = 2 * kTileRows;
constexpr int64_t kTilePanels = 16;  // of a block

/// Key tiles that are packed for all panels of a block. A panel walks over them while its O stays
/// in the L1 cache.
constexpr int64_t kChunk = 8;

/// The row block and a chunk of the keys in fast memory.
struct TileForwardScratch {
  uint16_t* Q[kTilePanels];                // columns of B, summed over d
  float* Ot[kTilePanels];                  // [dv in tiles][width]
  float *m[kTilePanels], *l[kTilePanels];  // [width]; m in units of the product
  uint16_t* K[kChunk];                     // rows of A, summed over d
  uint16_t* Vt[kChunk];                    // rows of A, summed over keys
  float* S;                                // [kBc][width]
  uint16_t* P[2];   // [kBc / 2][width][2]: B, summed over keys; of a tile and the one before
  float *V, *rows;  // [kBc][dv in tiles], [kTileRows][dv in tiles]

  TileForwardScratch(const Problem& p, Arena& arena) {
    const int64_t d = steps_of(p.d) * kTileDepth, dv = blocks_of(p.dv) * kTileRows;
    for (int64_t i = 0; i < kTilePanels; ++i) {
      Q[i] = arena.take_halves(kTilePanelRows * d);
      Ot[i] = arena.take(dv * kTilePanelRows);
      m[i] = arena.take(kTilePanelRows);
      l[i] = arena.take(kTilePanelRows);
    }
    for (int64_t i = 0; i < kChunk; ++i) {
      K[i] = arena.take_halves(kBc * d);
      Vt[i] = arena.take_halves(kBc * dv);
    }
    S = arena.take(kBc * kTilePanelRows);
    for (uint16_t*& packed : P) packed = arena.take_halves(kBc * kTilePanelRows);
    V = arena.take(kBc * dv);
    rows = arena.take(kTileRows * dv);
  }
};

inline int64_t tile_forward_scratch(const Problem& p) {
  Arena arena(nullptr);
  TileForwardScratch(p, arena);
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
    for (int64_t i = 0; i < n; ++i) {
      at[i] = static_cast<const uint16_t*>(address(t, row_offset(task, layout, row + i)));
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

/// The factor that is left for the softmax: none where the rules need scaled scores.
inline float softmax_factor(const Problem& p) {
  const float factor = query_factor(p);
  return p.softcap == 0 && !p.has_alibi() && factor > 0 ? factor : 1;
}

/// P [n / 2][width][2] in bf16 from P [n][width]. n is even.
HWY_INLINE void pack_probabilities(int64_t n, int64_t width, const float* HWY_RESTRICT P,
                                   uint16_t* HWY_RESTRICT to) {
  const F32 f;
  for (int64_t jj = 0; jj < n; jj += 2) {
    for (int64_t at = jj * width; at < (jj + 1) * width; at += kLanes) {
      const __m512i even = round_up_half(hn::Load(f, P + at));
      const __m512i odd = round_up_half(hn::Load(f, P + at + width));
      _mm512_store_si512(to + jj * width + 2 * (at - jj * width), pair_halves(even, odd));
    }
  }
}

/// The maximum m of the scores factor S so far, in units of S; alpha takes the factor that l and O
/// must be rescaled by (Alg. 1, lines 9 and 10). The maximum of a row stays while it is outgrown by
/// little: P then is up to 2^kSlack. Whether that of any row moved. n is even.
template <int kVectors>
HWY_INLINE bool tile_maximum(int64_t n, float factor, const float* HWY_RESTRICT S,
                             float* HWY_RESTRICT m, float* HWY_RESTRICT alpha) {
  constexpr float kSlack = 8;
  constexpr int64_t kWidth = kVectors * kLanes;
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity()), c = hn::Set(f, factor);
  V32 even[kVectors], odd[kVectors];
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) even[v] = odd[v] = none;
  for (int64_t jj = 0; jj < n; jj += 2) {
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      even[v] = hn::Max(even[v], hn::Load(f, S + jj * kWidth + v * kLanes));
      odd[v] = hn::Max(odd[v], hn::Load(f, S + (jj + 1) * kWidth + v * kLanes));
    }
  }
  bool moved = false;
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    const V32 highest = hn::Max(even[v], odd[v]), old = hn::Load(f, m + v * kLanes);
    // -inf - -inf is NaN, which is not above.
    const auto above = hn::Gt(hn::Mul(hn::Sub(highest, old), c), hn::Set(f, kSlack));
    const V32 rescale = exp2_short(hn::Mul(hn::Sub(old, highest), c));
    hn::Store(hn::IfThenElse(above, highest, old), f, m + v * kLanes);
    hn::Store(hn::IfThenElse(above, rescale, hn::Set(f, 1.0f)), f, alpha + v * kLanes);
    moved |= !hn::AllFalse(f, above);
  }
  return moved;
}

/// S -> P, in place or rounded and packed, and l (Alg. 1, line 9). work() is called some kTileWork
/// times on the way.
constexpr int64_t kTileWork = 8;
template <int kVectors, bool kInPlace, class Work>
HWY_INLINE void tile_probabilities(int64_t n, float factor, float* HWY_RESTRICT S,
                                   const float* HWY_RESTRICT m, const float* HWY_RESTRICT alpha,
                                   float* HWY_RESTRICT l, uint16_t* HWY_RESTRICT P,
                                   const Work& work) {
  constexpr int64_t kWidth = kVectors * kLanes, kKeys = kBc / kTileWork;
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity()), c = hn::Set(f, factor);
  V32 shift[kVectors], sum[kVectors];
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    // A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives P = 0.
    const V32 at = hn::Load(f, m + v * kLanes);
    shift[v] = hn::IfThenZeroElse(hn::Eq(at, none), at);
    sum[v] = hn::Zero(f);
  }
  for (int64_t begin = 0; begin < n; begin += kKeys) {
    work();
    for (int64_t jj = begin; jj < begin + kKeys; jj += 2) {
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
        float* const at = S + jj * kWidth + v * kLanes;
        const V32 p0 = exp2_short(hn::Mul(hn::Sub(hn::Load(f, at), shift[v]), c));
        const V32 p1 = exp2_short(hn::Mul(hn::Sub(hn::Load(f, at + kWidth), shift[v]), c));
        sum[v] = hn::Add(sum[v], hn::Add(p0, p1));
        if constexpr (kInPlace) {
          hn::Store(p0, f, at);
          hn::Store(p1, f, at + kWidth);
        } else {
          _mm512_store_si512(P + jj * kWidth + 2 * v * kLanes,
                             pair_halves(round_up_half(p0), round_up_half(p1)));
        }
      }
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    float* const at = l + v * kLanes;
    hn::Store(hn::MulAdd(hn::Load(f, at), hn::Load(f, alpha + v * kLanes), sum[v]), f, at);
  }
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

/// Rows [16 v, 16 v + 16) of C = C^T [columns][width], scaled lane by lane, into rows
/// [16][columns]. A whole number of blocks of columns.
HWY_INLINE void transpose_sums(const float* HWY_RESTRICT Ct, int64_t columns, int64_t width,
                               int64_t v, V32 scale, float* HWY_RESTRICT rows) {
  const F32 f;
  for (int64_t c = 0; c < columns; c += 16) {
    __m512i r[16];
    FULGUR_UNROLL for (int i = 0; i < 16; ++i) {
      const V32 x = hn::Load(f, Ct + (c + i) * width + v * kLanes);
      r[i] = _mm512_castps_si512(hn::Mul(x, scale).raw);
    }
    transpose_16(r);
    FULGUR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(rows + i * columns + c, r[i]);
  }
}

/// O = O / l and LSE = ln 2 (factor m + log2 l) of a panel (Alg. 1, lines 12 to 15).
HWY_INLINE void finish_tile_rows(const Task& task, const ForwardArgs& args, int64_t row,
                                 const Panel& panel, float factor, const float* HWY_RESTRICT Ot,
                                 const float* HWY_RESTRICT m, const float* HWY_RESTRICT l,
                                 float* HWY_RESTRICT rows) {
  const F32 f;
  const Problem& p = task.problem;
  const int64_t ld = blocks_of(p.dv) * kTileRows;
  for (int64_t v = 0; v < panel.vectors; ++v) {
    const int64_t count = std::min(kLanes, panel.count - v * kLanes);
    HWY_ALIGN float weight[kLanes] = {}, lse[kLanes];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = v * kLanes + i;
      const RowEnd end = end_row(task, row + r, factor * m[r], l[r]);
      weight[i] = end.weight;
      lse[i] = end.lse;
    }
    const V32 sum = hn::Load(f, l + v * kLanes);
    const V32 scale =
        hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(f)), hn::Div(hn::Load(f, weight), sum));
    transpose_sums(Ot, ld, panel.width(), v, scale, rows);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = v * kLanes + i;
      store_row(args.out.dtype, rows + i * ld, p.dv,
                address(args.out, row_offset(task, p.out, row + r)));
      if (!p.want_lse) continue;
      static_cast<float*>(args.lse.data)[row_offset(task, p.lse, row + r)] = lse[i];
    }
  }
}

/// One call.
template <class Tiles>
class TileForward {
 public:
  TileForward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
              float* scratch)
      : task_(task), p_(task.problem), args_(args), arena_(scratch), s_(p_, arena_) {
    for (int64_t row = row_begin; row < row_end; row += kTilePanelRows, ++count_) {
      Panel& panel = panels_[count_];
      make_panel(task, row, std::min(row_end, row + kTilePanelRows), &panel);
      tiles_[count_] = panel.tiles({0, task.s.sk});
      Census unused;
      pack_columns(query_rows(task, args.q, p_.q, p_.d, row, panel.count), panel.width(),
                   s_.Q[count_], &unused);
      std::fill_n(s_.Ot[count_], blocks_of(p_.dv) * kTileRows * panel.width(), 0.0f);
      std::fill_n(s_.m[count_], panel.width(), -std::numeric_limits<float>::infinity());
      std::fill_n(s_.l[count_], panel.width(), 0.0f);
    }
  }

  void run() {
    constexpr int64_t kKeys = kChunk * kBc;
    for (int64_t j = next(); j != KeyTiles::kEnd; j = next()) {
      chunk_ = j / kKeys * kKeys;
      std::fill_n(packed_, kChunk, false);
      for (int64_t i = 0; i < count_; ++i) walk(i, chunk_ + kKeys);
    }
  }

  void finish(int64_t row_begin) const {
    for (int64_t i = 0; i < count_; ++i) {
      finish_tile_rows(task_, args_, row_begin + i * kTilePanelRows, panels_[i], softmax_factor(p_),
                       s_.Ot[i], s_.m[i], s_.l[i], s_.rows);
    }
  }

 private:
  /// The first tile that a panel has yet to visit.
  int64_t next() const {
    int64_t j = KeyTiles::kEnd;
    for (int64_t i = 0; i < count_; ++i) j = std::min(j, tiles_[i].tile().j);
    return j;
  }

  /// Panel i over its tiles up to key `end`. The products of P and V of a key tile are issued
  /// between the exponentials of the next.
  void walk(int64_t i, int64_t end) {
    const Panel& panel = panels_[i];
    const float factor = softmax_factor(p_);
    bool waits = false;  // the tile before, for its products of P and V
    KeyTile before{};
    uint16_t *P = s_.P[0], *P_before = s_.P[1];
    for (KeyTile tile = tiles_[i].tile(); tile.j < end; tile = tiles_[i].tile()) {
      tiles_[i].next();
      const int64_t padded = steps_of(tile.n) * kTileDepth;
      score(i, tile);
      const bool moved = panel.vectors == 1
                             ? tile_maximum<1>(padded, factor, s_.S, s_.m[i], alpha_)
                             : tile_maximum<2>(padded, factor, s_.S, s_.m[i], alpha_);
      const bool by_tiles = tiles_add(tile);
      if (waits) products_.begin(of_values(i, before, P_before));
      if (moved || !by_tiles) {
        add_waiting();
        if (by_tiles) rescale(panel, p_.dv, alpha_, s_.Ot[i]);
      }
      if (panel.vectors == 1) {
        probabilities<1>(i, tile, by_tiles, P);
      } else {
        probabilities<2>(i, tile, by_tiles, P);
      }
      add_waiting();
      if (!by_tiles) add_by_vectors(i, tile);
      waits = by_tiles;
      before = tile;
      std::swap(P, P_before);
    }
    if (waits) products_.template multiply<true>(of_values(i, before, P_before));
    products_.flush();
  }

  void add_waiting() {
    while (!products_.done()) products_.template step<true>();
    products_.flush();
  }

  /// The place of a key tile in the chunk; packs it for the first panel that asks.
  int64_t place(const KeyTile& tile) {
    const int64_t at = (tile.j - chunk_) / kBc;
    if (packed_[at]) return at;
    packed_[at] = true;
    Census unused;
    values_[at] = Census();
    pack_rows(key_rows(task_, args_.k, p_.k, p_.d, tile.j, tile.n), tile.n, s_.K[at], &unused);
    pack_transposed(key_rows(task_, args_.v, p_.v, p_.dv, tile.j, tile.n), tile.n, s_.Vt[at],
                    &values_[at]);
    return at;
  }

  /// S = K Q^T, as the softmax wants it.
  void score(int64_t i, const KeyTile& tile) {
    const int64_t steps = steps_of(p_.d), width = panels_[i].width(), n = tile.n;
    products_.template multiply<false>({blocks_of(n), panels_[i].vectors, steps,
                                        Operand::packed(s_.K[place(tile)], steps),
                                        Operand::packed(s_.Q[i], steps), s_.S, width});
    products_.flush();
    if (softmax_factor(p_) != query_factor(p_)) scale_scores(n, width, query_factor(p_), s_.S);
    score_rule(p_, panels_[i], tile, s_.S, width, nullptr);
    std::fill(s_.S + n * width, s_.S + steps_of(n) * kTileDepth * width,
              -std::numeric_limits<float>::infinity());
  }

  /// Whether the tiles may add P V: only rows that see a key take part in what is not finite, and
  /// tiles take denormal numbers for 0.
  bool tiles_add(const KeyTile& tile) {
    const Census& values = values_[place(tile)];
    return !values.denormal() && (values.finite() || !tile.partial);
  }

  /// S -> P, where the tiles are to add P V packed, else in place.
  template <int kVectors>
  void probabilities(int64_t i, const KeyTile& tile, bool by_tiles, uint16_t* P) {
    const int64_t n = steps_of(tile.n) * kTileDepth, width = kVectors * kLanes;
    const float factor = softmax_factor(p_);
    const auto work = [&]() HWY_ATTR {
      if (!products_.done()) products_.template step<true>();
    };
    if (by_tiles && p_.dropout_p == 0) {
      return tile_probabilities<kVectors, false>(n, factor, s_.S, s_.m[i], alpha_, s_.l[i], P,
                                                 work);
    }
    tile_probabilities<kVectors, true>(n, factor, s_.S, s_.m[i], alpha_, s_.l[i], P, work);
    if (p_.dropout_p > 0) {
      const auto keep_scale = static_cast<float>(1 / (1 - p_.dropout_p));
      drop(task_.given.dropout, keep_scale, panels_[i], tile, width, s_.S, nullptr);
    }
    if (by_tiles) pack_probabilities(n, width, s_.S, P);
  }

  /// O^T += V^T P^T.
  Product of_values(int64_t i, const KeyTile& tile, const uint16_t* P) {
    const int64_t steps = steps_of(tile.n), width = panels_[i].width();
    return {blocks_of(p_.dv),
            panels_[i].vectors,
            steps,
            Operand::packed(s_.Vt[place(tile)], steps),
            {P, width * 4, kTileDepth, kTileRows * width * 2},
            s_.Ot[i],
            width};
  }

  void add_by_vectors(int64_t i, const KeyTile& tile) {
    const int64_t ld = blocks_of(p_.dv) * kTileRows;
    load_keys(task_, args_.v, p_.v, p_.dv, tile.j, tile.n, s_.V, ld);
    accumulate_visible(panels_[i], tile, p_.dv, s_.V, ld, s_.S, panels_[i].width(), alpha_,
                       s_.Ot[i]);
  }

  const Task& task_;
  const Problem& p_;
  const ForwardArgs& args_;
  Arena arena_;
  const TileForwardScratch s_;
  const typename Tiles::Session session_;
  Products<Tiles> products_;
  Panel panels_[kTilePanels];
  KeyTiles tiles_[kTilePanels];  // that each panel has yet to visit
  int64_t count_ = 0;
  int64_t chunk_ = 0;      // its first key
  bool packed_[kChunk];    // its tiles
  Census values_[kChunk];  // of V
  HWY_ALIGN float alpha_[kTilePanelRows];
};

template <class Tiles>
void tile_forward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                  float* scratch) {
  TileForward<Tiles> block(task, args, row_begin, row_end, scratch);
  block.run();
  block.finish(row_begin);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
