// FlashAttention-2 forward (Alg. 1) on the CPU: S^T = K Q^T and O^T += V^T P^T, a query row in each
// lane, so that neither the row maximum nor the row sum crosses lanes.
#if defined(FULGUR_CPU_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_FORWARD_INL_H_
#undef FULGUR_CPU_FORWARD_INL_H_
#else
#define FULGUR_CPU_FORWARD_INL_H_
#endif

#include "base/sinks.h"
#include "cpu/kernels/simd/score-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kPackingRows = 5;  // see Kernels::packing_rows

/// The row block in fast memory.
struct ForwardScratch {
  float *Qt[kRowTiles], *Ot[kRowTiles];  // [d][width], [dv][width]
  float *m[kRowTiles], *l[kRowTiles];    // [width]
  float *K, *V;                          // [kBc][round_up(d)], [kBc][round_up(dv)]
  float* S;                              // [kBc][kBr]
  float* rows;                           // [kBr][round_up(max(d, dv))]
  float* bias;                           // [kBc][width]

  ForwardScratch(const Problem& p, Arena& arena) : bias(take_bias_tile(p, arena)) {
    for (int64_t i = 0; i < kRowTiles; ++i) {
      Qt[i] = arena.take(p.d * kBr);
      Ot[i] = arena.take(p.dv * kBr);
      m[i] = arena.take(kBr);
      l[i] = arena.take(kBr);
    }
    K = arena.take(kBc * round_up(p.d, kLanes));
    V = arena.take(kBc * round_up(p.dv, kLanes));
    S = arena.take(kBc * kBr);
    rows = arena.take(kBr * round_up(std::max(p.d, p.dv), kLanes));
  }
};

inline int64_t forward_scratch(const Problem& p) {
  Arena arena(nullptr);
  ForwardScratch(p, arena);
  return arena.used();
}

/// S -> P in place, m and l updated; alpha takes the factor that O must be rescaled by
/// (Alg. 1, lines 8 to 10, in powers of 2). kVectors chains of max and sum run side by side.
template <int kVectors>
HWY_INLINE void online_softmax_of(int64_t n, float* HWY_RESTRICT S, int64_t ld,
                                  float* HWY_RESTRICT m, float* HWY_RESTRICT l,
                                  float* HWY_RESTRICT alpha) {
  const F32 f;
  const Flushing on(true);
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
  V32 m_new[kVectors], shift[kVectors], sum[kVectors];
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) m_new[v] = hn::Load(f, m + v * kLanes);
  for (int64_t jj = 0; jj < n; ++jj) {
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      m_new[v] = hn::Max(m_new[v], hn::Load(f, S + jj * ld + v * kLanes));
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    // A row that has seen no key yet: -inf - -inf would be NaN, -inf - 0 gives P = 0.
    shift[v] = hn::IfThenZeroElse(hn::Eq(m_new[v], none), m_new[v]);
    sum[v] = hn::Zero(f);
  }
  for (int64_t jj = 0; jj < n; ++jj) {
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* at = S + jj * ld + v * kLanes;
      const V32 p = exp2(hn::Sub(hn::Load(f, at), shift[v]));
      hn::Store(p, f, at);
      sum[v] = hn::Add(sum[v], p);
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
    const V32 rescale = exp2(hn::Sub(hn::Load(f, m + v * kLanes), shift[v]));
    hn::Store(m_new[v], f, m + v * kLanes);
    hn::Store(rescale, f, alpha + v * kLanes);
    hn::Store(hn::MulAdd(hn::Load(f, l + v * kLanes), rescale, sum[v]), f, l + v * kLanes);
  }
}

HWY_INLINE void online_softmax(const RowTile& row_tile, int64_t n, float* HWY_RESTRICT S,
                               int64_t ld, float* HWY_RESTRICT m, float* HWY_RESTRICT l,
                               float* HWY_RESTRICT alpha) {
  switch (row_tile.vectors) {
    case 1:
      return online_softmax_of<1>(n, S, ld, m, l, alpha);
    case 2:
      return online_softmax_of<2>(n, S, ld, m, l, alpha);
    default:
      return online_softmax_of<3>(n, S, ld, m, l, alpha);
  }
}

/// O^T += V^T P^T where V has inf or NaN: a key adds only to the rows that see it, because 0 * NaN
/// is NaN.
HWY_NOINLINE inline void accumulate_visible(const RowTile& row_tile, const KeyTile& tile,
                                            int64_t dv, const float* HWY_RESTRICT V, int64_t ldv,
                                            const float* HWY_RESTRICT P, int64_t ldp,
                                            const float* HWY_RESTRICT alpha,
                                            float* HWY_RESTRICT Ot) {
  const F32 f;
  const Visible visible(row_tile.mask, row_tile.vectors, tile);
  for (int64_t v = 0; v < row_tile.vectors; ++v) {
    for (int64_t c = 0; c < dv; ++c) {
      float* o = Ot + c * row_tile.width() + v * kLanes;
      hn::Store(hn::Mul(hn::Load(f, o), hn::Load(f, alpha + v * kLanes)), f, o);
    }
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      const auto seen = visible.mask(v, jj);
      const V32 p = hn::Load(f, P + jj * ldp + v * kLanes);
      for (int64_t c = 0; c < dv; ++c) {
        float* o = Ot + c * row_tile.width() + v * kLanes;
        const V32 add = hn::IfThenElseZero(seen, hn::Mul(p, hn::Set(f, V[jj * ldv + c])));
        hn::Store(hn::Add(hn::Load(f, o), add), f, o);
      }
    }
  }
}

/// The end of a row, after its sink has joined: the factor of O / l, and LSE if it is wanted.
struct RowEnd {
  float weight = 1, lse = 0;
};

/// The end of row r, whose maximum m is in log2 units.
HWY_INLINE RowEnd end_row(const Task& task, int64_t r, float m, float l) {
  const Problem& p = task.problem;
  RowEnd end;
  if (!p.has(Arg::kLse) && !p.has(Arg::kSinks)) return end;
  end.lse = l == 0 ? -std::numeric_limits<float>::infinity() : (m + std::log2(l)) * kLn2;
  if (!p.has(Arg::kSinks)) return end;
  const SinkJoined joined = join_sink(task.given.sink(task.head(r)), end.lse);
  return {static_cast<float>(joined.keys), static_cast<float>(joined.lse)};
}

/// Stores O = O / l and LSE = ln 2 (m + log2 l) of a row tile (Alg. 1, lines 12 to 15).
HWY_INLINE void finish_rows(const Task& task, const ForwardArgs& args, int64_t row,
                            const RowTile& row_tile, const float* HWY_RESTRICT Ot,
                            const float* HWY_RESTRICT m, const float* HWY_RESTRICT l,
                            float* HWY_RESTRICT rows) {
  const F32 f;
  const Problem& p = task.problem;
  const int64_t ld = round_up(p.dv, kLanes), width = row_tile.width();
  const auto lane_column = hn::Mul(hn::Iota(I32(), 0), hn::Set(I32(), static_cast<int32_t>(width)));
  for (int64_t r = 0; r < row_tile.count; ++r) {
    const RowEnd end = end_row(task, row + r, m[r], l[r]);
    const V32 scale = hn::Set(f, l[r] == 0 ? 0 : end.weight / l[r]);
    int64_t c = 0;
    for (; c + kLanes <= p.dv; c += kLanes) {
      const V32 o = hn::GatherIndex(f, Ot + c * width + r, lane_column);
      hn::Store(hn::Mul(o, scale), f, rows + c);
    }
    for (; c < ld; ++c) rows[c] = c < p.dv ? Ot[c * width + r] * hn::GetLane(scale) : 0;
    store_row(args.out.dtype, rows, p.dv, address(args.out, row_offset(task, p.out, row + r)));
    if (!p.has(Arg::kLse)) continue;
    static_cast<float*>(args.lse.data)[row_offset(task, p.lse, row + r)] = end.lse;
  }
}

/// Rows of K or V that are prefetched to the L2 cache while products of earlier keys are computed.
/// A block of few rows would wait for memory most of its time.
class KeyPrefetch {
 public:
  /// Keys [j, j + n) of a task, in so many parts.
  RowPrefetch of(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                 int64_t j, int64_t n, int64_t parts) {
    if (n <= 0) return {};
    const char* rows[kBc];
    key_addresses(task, t, layout, j, n, rows);
    const auto* const from = static_cast<const char*>(t.data);
    for (int64_t i = 0; i < n; ++i) offsets_[i] = rows[i] - from;
    return {from, offsets_, 1, bytes_of(t.dtype, dim), n, (n + parts - 1) / parts, true};
  }

 private:
  int64_t offsets_[kBc];
};

inline void forward(const Task& task, const ForwardArgs& args, int64_t row_begin, int64_t row_end,
                    float* scratch) {
  const Problem& p = task.problem;
  Arena arena(scratch);
  const ForwardScratch s(p, arena);
  const int64_t ldk = round_up(p.d, kLanes), ldv = round_up(p.dv, kLanes);
  const kernels::DropoutMask& dropout = task.given.dropout;
  const OperandScaling& scaling = task.given.scaling;
  HWY_ALIGN float alpha[kBr];
  TaskExpressions expressions(task, scratch);

  RowTile row_tiles[kRowTiles];
  KeyTiles tiles[kRowTiles];  // that each row tile has yet to visit
  int64_t count = 0, key_end = 0;
  for (int64_t row = row_begin; row < row_end; row += kBr, ++count) {
    RowTile& row_tile = row_tiles[count];
    make_row_tile(task, row, std::min(row_end, row + kBr), &row_tile);
    key_end = std::max(key_end, row_tile.mask.end());
    tiles[count] = row_tile.mask.tiles({0, task.s.sk});
    expressions.set_rows(row_tile, row, count);
    expressions.skip_hidden(count, &tiles[count]);
    load_queries(task, args.q, p.q, p.d, row, row_tile.count, row_tile.width(), s.rows, ldk,
                 scaling.q);
    transpose(s.rows, ldk, row_tile.width(), p.d, query_factor(p), s.Qt[count], row_tile.width());
    std::fill_n(s.Ot[count], p.dv * row_tile.width(), 0.0f);
    std::fill_n(s.m[count], row_tile.width(), -std::numeric_limits<float>::infinity());
    std::fill_n(s.l[count], row_tile.width(), 0.0f);
  }

  // The row tile of the next visit. All row tiles visit a key tile before the next one, so that it
  // is widened only once.
  const auto next = [&] {
    const auto before = [](const KeyTiles& x, const KeyTiles& y) {
      return x.tile().j < y.tile().j;
    };
    return std::min_element(tiles, tiles + count, before) - tiles;
  };
  KeyPrefetch k_prefetch, v_prefetch;
  int64_t begun = -1, loaded = -1;  // the first keys of the latest tile, and of that in K and V
  bool finite = false;
  for (int64_t i = next(), later = i; !tiles[i].done(); i = later) {
    RowTile& row_tile = row_tiles[i];
    const KeyTile tile = tiles[i].tile();
    const int64_t j = tile.j, n = tile.n, width = row_tile.width();
    tiles[i].next();
    expressions.skip_hidden(i, &tiles[i]);
    later = next();
    if (j != begun) expressions.set_columns(j, n, 0);
    begun = j;
    if (!begin_tile(task, expressions, i, 0, tile, s.bias, &row_tile)) continue;
    RowPrefetch prefetch, keys, values;  // of the bias of the next visit, and of the next keys
    const int64_t parts = (n + p.dv) / kBlockRows<3> + 1;
    if (j != loaded) {
      load_keys(task, args.k, p.k, p.d, j, n, s.K, ldk, scaling.k);
      finite = load_keys(task, args.v, p.v, p.dv, j, n, s.V, ldv, scaling.v);
      loaded = j;
      const int64_t after = std::min(kBc, key_end - j - n);
      keys = k_prefetch.of(task, args.k, p.k, p.d, j + n, after, parts);
      values = v_prefetch.of(task, args.v, p.v, p.dv, j + n, after, parts);
    }
    if (finite) row_tile.bias_memory = nullptr;  // the mask is not asked what the bias hides
    if (const KeyTiles& after = tiles[later]; !after.done()) {
      prefetch =
          bias_prefetch(task.given.bias.data, p.bias, row_tiles[later].bias_row,
                        row_tiles[later].bias_count(), after.tile().j, after.tile().n, parts);
    }
    prefetch.also = &keys;
    keys.also = &values;
    gemm<Init::kZero>(n, row_tile.vectors, p.d, {s.K, ldk, 1}, {s.Qt[i], width}, s.S, width,
                      nullptr, &prefetch);
    score_rule(p, expressions, i, 0, tile, s.S, width, nullptr, s.bias, &row_tile);
    online_softmax(row_tile, n, s.S, width, s.m[i], s.l[i], alpha);
    if (p.dropout_p > 0) {
      const auto keep_scale = static_cast<float>(1 / (1 - p.dropout_p));
      drop(dropout, keep_scale, row_tile, tile, width, s.S, nullptr);
    }
    if (finite || !row_tile.mask.hides(tile)) {
      gemm<Init::kScaleAdd>(p.dv, row_tile.vectors, n, {s.V, 1, ldv}, {s.S, width}, s.Ot[i], width,
                            alpha, &prefetch);
    } else {
      accumulate_visible(row_tile, tile, p.dv, s.V, ldv, s.S, width, alpha, s.Ot[i]);
    }
    prefetch.finish();
  }
  for (int64_t i = 0; i < count; ++i) {
    finish_rows(task, args, row_begin + i * kBr, row_tiles[i], s.Ot[i], s.m[i], s.l[i], s.rows);
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
