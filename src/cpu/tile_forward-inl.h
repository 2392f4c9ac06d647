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
  uint16_t* P;                             // [kBc / 2][width][2]: B, summed over keys
  float *V, *rows;                         // [kBc][dv in tiles], [kTileRows][dv in tiles]

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
    P = arena.take_halves(kBc * kTilePanelRows);
    V = arena.take(kBc * dv);
    rows = arena.take(kTileRows * dv);
  }
};

inline int64_t tile_forward_scratch(const Problem& p) {
  Arena arena(nullptr);
  TileForwardScratch(p, arena);
  return arena.used();
}

/// Keys [j, j + n) of K or V of a task.
inline auto key_rows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                     int64_t j, int64_t n) {
  const auto* first =
      static_cast<const uint16_t*>(address(t, layout.offset(task.b, task.s.k_begin + j, task.kv)));
  return Rows{[=, row = layout.row](int64_t i) { return first + i * row; }, n, dim};
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

/// S -> P, in place or rounded and packed; m and l updated, alpha takes the factor that O must be
/// rescaled by (Alg. 1, lines 8 to 10). The maximum of a row stays while it is outgrown by little:
/// P then is up to 2^kSlack. n is even.
template <int kVectors, bool kInPlace>
HWY_INLINE void tile_softmax_of(int64_t n, float factor, float* HWY_RESTRICT S,
                                float* HWY_RESTRICT m, float* HWY_RESTRICT l,
                                float* HWY_RESTRICT alpha, uint16_t* HWY_RESTRICT P) {
  constexpr float kSlack = 8;
  constexpr int64_t kWidth = kVectors * kLanes;
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity()), c = hn::Set(f, factor);
  V32 even[kVectors], odd[kVectors], shift[kVectors], sum[kVectors];
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) even[v] = odd[v] = none;
  for (int64_t jj = 0; jj < n; jj += 2) {
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      even[v] = hn::Max(even[v], hn::Load(f, S + jj * kWidth + v * kLanes));
      odd[v] = hn::Max(odd[v], hn::Load(f, S + (jj + 1) * kWidth + v * kLanes));
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    const V32 highest = hn::Max(even[v], odd[v]), old = hn::Load(f, m + v * kLanes);
    // -inf - -inf is NaN, which is not above.
    const auto above = hn::Gt(hn::Mul(hn::Sub(highest, old), c), hn::Set(f, kSlack));
    const V32 m_new = hn::IfThenElse(above, highest, old);
    shift[v] = hn::IfThenZeroElse(hn::Eq(m_new, none), m_new);
    hn::Store(m_new, f, m + v * kLanes);
    hn::Store(
        hn::IfThenElse(above, exp2_short(hn::Mul(hn::Sub(old, shift[v]), c)), hn::Set(f, 1.0f)), f,
        alpha + v * kLanes);
    sum[v] = hn::Zero(f);
  }
  for (int64_t jj = 0; jj < n; jj += 2) {
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
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    float* const at = l + v * kLanes;
    hn::Store(hn::MulAdd(hn::Load(f, at), hn::Load(f, alpha + v * kLanes), sum[v]), f, at);
  }
}

template <bool kInPlace>
HWY_INLINE void tile_softmax(const Panel& panel, int64_t n, float factor, float* HWY_RESTRICT S,
                             float* HWY_RESTRICT m, float* HWY_RESTRICT l,
                             float* HWY_RESTRICT alpha, uint16_t* HWY_RESTRICT P) {
  if (panel.vectors == 1) return tile_softmax_of<1, kInPlace>(n, factor, S, m, l, alpha, P);
  return tile_softmax_of<2, kInPlace>(n, factor, S, m, l, alpha, P);
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
    const V32 sum = hn::Load(f, l + v * kLanes);
    const V32 scale = hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(f)), hn::Div(hn::Set(f, 1.0f), sum));
    transpose_sums(Ot, ld, panel.width(), v, scale, rows);
    const int64_t count = std::min(kLanes, panel.count - v * kLanes);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = v * kLanes + i;
      store_row(args.out.dtype, rows + i * ld, p.dv,
                address(args.out, row_offset(task, p.out, row + r)));
      if (!p.want_lse) continue;
      static_cast<float*>(args.lse.data)[row_offset(task, p.lse, row + r)] =
          l[r] == 0 ? -std::numeric_limits<float>::infinity()
                    : (factor * m[r] + std::log2(l[r])) * kLn2;
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

  /// Panel i over its tiles up to key `end`. P of a tile waits for its product with V until S of
  /// the next is under way: what has just been stored is slow to load.
  void walk(int64_t i, int64_t end) {
    KeyTile before{};
    bool waits = false;
    for (KeyTile tile = tiles_[i].tile(); tile.j < end; tile = tiles_[i].tile()) {
      tiles_[i].next();
      score(i, tile);
      if (waits) accumulate(i, before);
      products_.flush();
      waits = softmax(i, tile);
      if (!waits) accumulate_by_vectors(i, tile);
      before = tile;
    }
    if (waits) accumulate(i, before);
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

  /// S^T = K Q^T.
  void score(int64_t i, const KeyTile& tile) {
    const int64_t steps = steps_of(p_.d), width = panels_[i].width();
    products_.template multiply<false>(blocks_of(tile.n), panels_[i].vectors, steps,
                                       Operand::packed(s_.K[place(tile)], steps),
                                       Operand::packed(s_.Q[i], steps), s_.S, width);
  }

  /// S -> P, m, l, O rescaled. False where vectors have to add P V: P then is in the place of S and
  /// O not rescaled.
  bool softmax(int64_t i, const KeyTile& tile) {
    float* const S = s_.S;
    uint16_t* const P = s_.P;
    const Panel& panel = panels_[i];
    const int64_t n = tile.n, padded = steps_of(n) * kTileDepth, width = panel.width();
    const float factor = softmax_factor(p_);
    if (factor != query_factor(p_)) scale_scores(n, width, query_factor(p_), S);
    score_rule(p_, panel, tile, S, width, nullptr);
    std::fill(S + n * width, S + padded * width, -std::numeric_limits<float>::infinity());
    // Only rows that see a key take part in what is not finite, and tiles take denormals for 0.
    const Census& values = values_[place(tile)];
    const bool by_tiles = !values.denormal() && (values.finite() || !tile.partial);
    if (by_tiles && p_.dropout_p == 0) {
      tile_softmax<false>(panel, padded, factor, S, s_.m[i], s_.l[i], alpha_, P);
    } else {
      tile_softmax<true>(panel, padded, factor, S, s_.m[i], s_.l[i], alpha_, P);
      if (p_.dropout_p > 0) {
        const auto keep_scale = static_cast<float>(1 / (1 - p_.dropout_p));
        drop(task_.dropout(), keep_scale, panel, tile, width, S, nullptr);
      }
      if (by_tiles) pack_probabilities(padded, width, S, P);
    }
    if (by_tiles) rescale(panel, p_.dv, alpha_, s_.Ot[i]);
    return by_tiles;
  }

  /// O^T += V^T P^T.
  void accumulate(int64_t i, const KeyTile& tile) {
    const int64_t steps = steps_of(tile.n), width = panels_[i].width();
    products_.template multiply<true>(
        blocks_of(p_.dv), panels_[i].vectors, steps, Operand::packed(s_.Vt[place(tile)], steps),
        {s_.P, width * 4, kTileDepth, kTileRows * width * 2}, s_.Ot[i], width);
  }

  void accumulate_by_vectors(int64_t i, const KeyTile& tile) {
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
