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

/// The row block in fast memory. `Words` of 16 bits.
struct TileForwardScratch {
  uint16_t* Q[kPanels];            // columns of B, summed over d
  float* Ot[kPanels];              // [dv in tiles][width]
  float *m[kPanels], *l[kPanels];  // [width]; m in units of the product
  uint16_t *K, *Vt;                // rows of A, summed over d; rows of A, summed over keys
  float* S;                        // [kBc][width]
  uint16_t* P;                     // [kBc / 2][width][2]: B, summed over keys
  float *V, *rows;                 // [kBc][round_up(dv)], [kTileRows][dv in tiles]

  TileForwardScratch(const Problem& p, Arena& arena) {
    const int64_t d = steps_of(p.d) * kTileDepth, dv = blocks_of(p.dv) * kTileRows;
    for (int64_t i = 0; i < kPanels; ++i) {
      Q[i] = arena.take_halves(kTilePanelRows * d);
      Ot[i] = arena.take(dv * kTilePanelRows);
      m[i] = arena.take(kTilePanelRows);
      l[i] = arena.take(kTilePanelRows);
    }
    K = arena.take_halves(kBc * d);
    Vt = arena.take_halves(kBc * dv);
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

/// Rows [row, row + n) of q or dout of a task.
inline auto query_rows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                       int64_t row, int64_t n) {
  return Rows{[&, row](int64_t i) {
                return static_cast<const uint16_t*>(address(t, row_offset(task, layout, row + i)));
              },
              n, dim};
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

template <class Tiles>
void tile_forward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                  float* scratch) {
  const typename Tiles::Session session;
  const Problem& p = task.problem;
  Arena arena(scratch);
  const TileForwardScratch s(p, arena);
  const int64_t steps = steps_of(p.d), dv_blocks = blocks_of(p.dv), dv = dv_blocks * kTileRows;
  const float factor = query_factor(p), left = softmax_factor(p);
  const DropoutMask dropout = task.dropout();
  HWY_ALIGN float alpha[kTilePanelRows];

  Panel panels[kPanels];
  KeyTiles tiles[kPanels];  // that each panel has yet to visit
  int64_t count = 0;
  for (int64_t row = row_begin; row < row_end; row += kTilePanelRows, ++count) {
    Panel& panel = panels[count];
    make_panel(task, row, std::min(row_end, row + kTilePanelRows), &panel);
    tiles[count] = panel.tiles({0, task.s.sk});
    Census unused;
    pack_columns(query_rows(task, args.q, p.q, p.d, row, panel.count), panel.width(), s.Q[count],
                 &unused);
    std::fill_n(s.Ot[count], dv * panel.width(), 0.0f);
    std::fill_n(s.m[count], panel.width(), -std::numeric_limits<float>::infinity());
    std::fill_n(s.l[count], panel.width(), 0.0f);
  }

  // The panels walk side by side: a tile is packed once for all that visit it.
  const auto next_tile = [&] {
    return *std::min_element(tiles, tiles + count, [](const KeyTiles& x, const KeyTiles& y) {
      return x.tile().j < y.tile().j;
    });
  };
  for (KeyTiles next = next_tile(); !next.done(); next = next_tile()) {
    const int64_t j = next.tile().j, n = next.tile().n, key_steps = steps_of(n);
    const int64_t padded = key_steps * kTileDepth;
    Census unused, values;
    pack_rows(key_rows(task, args.k, p.k, p.d, j, n), padded, s.K, &unused);
    pack_transposed(key_rows(task, args.v, p.v, p.dv, j, n), padded, s.Vt, &values);
    for (int64_t i = 0; i < count; ++i) {
      const Panel& panel = panels[i];
      const KeyTile tile = tiles[i].tile();
      if (tile.j != j) continue;
      tiles[i].next();
      const int64_t width = panel.width();
      multiply<Tiles, false>(blocks_of(padded), panel.vectors, steps, Operand::packed(s.K, steps),
                             Operand::packed(s.Q[i], steps), s.S, width);
      if (left != factor) scale_scores(n, width, factor, s.S);
      score_rule(p, panel, tile, s.S, width, nullptr);
      std::fill(s.S + n * width, s.S + padded * width, -std::numeric_limits<float>::infinity());
      // Only rows that see a key take part in what is not finite, and tiles take denormals for 0.
      const bool by_vectors = values.denormal() || (tile.partial && !values.finite());
      if (by_vectors || p.dropout_p > 0) {
        tile_softmax<true>(panel, padded, left, s.S, s.m[i], s.l[i], alpha, s.P);
      } else {
        tile_softmax<false>(panel, padded, left, s.S, s.m[i], s.l[i], alpha, s.P);
      }
      if (p.dropout_p > 0) {
        const auto keep_scale = static_cast<float>(1 / (1 - p.dropout_p));
        drop(dropout, keep_scale, panel, tile, width, s.S, nullptr);
        if (!by_vectors) pack_probabilities(padded, width, s.S, s.P);
      }
      if (by_vectors) {
        load_keys(task, args.v, p.v, p.dv, j, n, s.V, dv);
        accumulate_visible(panel, tile, p.dv, s.V, dv, s.S, width, alpha, s.Ot[i]);
        continue;
      }
      rescale(panel, p.dv, alpha, s.Ot[i]);
      multiply<Tiles, true>(dv_blocks, panel.vectors, key_steps, Operand::packed(s.Vt, key_steps),
                            {s.P, width * 4, kTileDepth, kTileRows * width * 2}, s.Ot[i], width);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    finish_tile_rows(task, args, row_begin + i * kTilePanelRows, panels[i], left, s.Ot[i], s.m[i],
                     s.l[i], s.rows);
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif
