// FlashAttention-2 backward (Alg. 2) on the CPU: K/V tiles outside, row tiles inside. S^T and dP^T
// have a query row in each lane; dV, dK and dQ have the head dim in the lanes, where their other
// operand is contiguous. All five are the one product of gemm-inl.h.
#if defined(FULGUR_CPU_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_BACKWARD_INL_H_
#undef FULGUR_CPU_BACKWARD_INL_H_
#else
#define FULGUR_CPU_BACKWARD_INL_H_
#endif

#include "call/make_problem.h"
#include "cpu/kernels/simd/score-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

struct BackwardScratch {
  int64_t ldk, ldv;            // round_up(d), round_up(dv)
  float *K, *V, *dK, *dV;      // [kTiles * kBc][ldk or ldv]
  float *Q, *dO;               // [kBr][ldk or ldv]
  float *Qt, *dOt;             // [d or dv][width]
  float *P, *Pz, *dS, *slope;  // [kBc][width]; Pz = Z o P, the dropped P (the same without)
  float* dBias;                // [kBc][width]: dS before the slope of the scores (the same without)
  float* bias;                 // [kBc][width]

  BackwardScratch(const Problem& p, Arena& arena)
      : ldk(round_up(p.d, kLanes)), ldv(round_up(p.dv, kLanes)), bias(take_bias_tile(p, arena)) {
    for (float** tile : {&K, &dK}) *tile = arena.take(kTiles * kBc * ldk);
    for (float** tile : {&V, &dV}) *tile = arena.take(kTiles * kBc * ldv);
    Q = arena.take(kBr * ldk);
    dO = arena.take(kBr * ldv);
    Qt = arena.take(kBr * p.d);
    dOt = arena.take(kBr * p.dv);
    P = arena.take(kBc * kBr);
    dS = arena.take(kBc * kBr);
    Pz = p.dropout_p > 0 ? arena.take(kBc * kBr) : P;
    slope = has_score_slope(p) ? arena.take(kBc * kBr) : nullptr;
    const bool before_slope = p.has(Arg::kDbias) || p.expressions.wants_gradients();
    dBias = has_score_slope(p) && before_slope ? arena.take(kBc * kBr) : dS;
  }
};

inline int64_t backward_scratch(const Problem& p) {
  Arena arena(nullptr);
  BackwardScratch(p, arena);
  return arena.used();
}

inline int64_t dq_stride(const Problem& p) { return round_up(p.d, kLanes); }

inline int64_t dq_floats(const Problem& p, int64_t rows) {
  return round_up(rows * dq_stride(p), 16);
}

/// An element of lse or dlse.
inline float lse_at(const Task& task, const ConstTensor& t, const Layout& layout, int64_t r) {
  return static_cast<const float*>(t.data)[row_offset(task, layout, r)];
}

/// D = rowsum(dO o O) - dLSE of rows [row_begin, row_end) (Alg. 2, line 4).
inline void backward_d(const Task& task, const BackwardArgs& args, int64_t row_begin,
                       int64_t row_end, float* D) {
  const F32 f;
  const Problem& p = task.problem;
  const int64_t ld = round_up(p.dv, kLanes);
  HWY_ALIGN float o[kMaxValueDim + kLanes], d_o[kMaxValueDim + kLanes];
  for (int64_t r = row_begin; r < row_end; ++r) {
    load_queries(task, args.out, p.out, p.dv, r, 1, 1, o, ld);
    load_queries(task, args.dout, p.dout, p.dv, r, 1, 1, d_o, ld);
    V32 sum = hn::Zero(f);
    for (int64_t c = 0; c < ld; c += kLanes) {
      sum = hn::MulAdd(hn::Load(f, o + c), hn::Load(f, d_o + c), sum);
    }
    D[r] = hn::GetLane(hn::SumOfLanes(f, sum));
    // A row that saw no key has no gradient of its LSE.
    if (p.has(Arg::kDlse) &&
        lse_at(task, args.lse, p.lse, r) != -std::numeric_limits<float>::infinity()) {
      D[r] -= lse_at(task, args.dlse, p.dlse, r);
    }
  }
}

/// P = exp(S - LSE) in place (line 11). Masked entries are set to 0, whatever the row or key holds.
HWY_INLINE void probabilities(const RowTile& row_tile, const KeyTile& tile, float* HWY_RESTRICT P,
                              const float* HWY_RESTRICT lse2) {
  const F32 f;
  const int64_t n = tile.n;
  const bool partial = row_tile.mask.hides(tile);
  const Flushing on(true);
  const Visible visible(row_tile.mask, row_tile.vectors, tile);
  for (int64_t v = 0; v < row_tile.vectors; ++v) {
    const V32 shift = hn::Load(f, lse2 + v * kLanes);
    for (int64_t jj = 0; jj < n; ++jj) {
      float* at = P + jj * row_tile.width() + v * kLanes;
      // P is at most 1, but the rounding errors of huge scores and their LSE are large enough to
      // make exp2 overflow.
      V32 p = exp2(at_most(hn::Zero(f), hn::Sub(hn::Load(f, at), shift)));
      if (partial) p = hn::IfThenElseZero(visible.mask(v, jj), p);
      hn::Store(p, f, at);
    }
  }
}

/// dS = P o (dP - D) in place of dP (line 14), times the slope of the score. dBias, if it is not
/// dS, takes dS without the slope. Masked entries are set to 0.
HWY_INLINE void score_gradient(const RowTile& row_tile, const KeyTile& tile,
                               const float* HWY_RESTRICT P, const float* HWY_RESTRICT D,
                               const float* HWY_RESTRICT slope, float* dS, float* dBias) {
  const F32 f;
  const int64_t n = tile.n;
  const bool partial = row_tile.mask.hides(tile);
  const Visible visible(row_tile.mask, row_tile.vectors, tile);
  for (int64_t v = 0; v < row_tile.vectors; ++v) {
    const V32 d = hn::Load(f, D + v * kLanes);
    for (int64_t jj = 0; jj < n; ++jj) {
      const int64_t at = jj * row_tile.width() + v * kLanes;
      V32 ds = hn::Mul(hn::Load(f, P + at), hn::Sub(hn::Load(f, dS + at), d));
      if (partial) ds = hn::IfThenElseZero(visible.mask(v, jj), ds);
      if (slope != nullptr) {
        if (dBias != dS) hn::Store(ds, f, dBias + at);
        ds = hn::Mul(ds, hn::Load(f, slope + at));
        if (partial) ds = hn::IfThenElseZero(visible.mask(v, jj), ds);
      }
      hn::Store(ds, f, dS + at);
    }
  }
}

/// to += factor * from.
HWY_INLINE void add_row(float factor, const float* HWY_RESTRICT from, int64_t n,
                        float* HWY_RESTRICT to) {
  const F32 f;
  const V32 a = hn::Set(f, factor);
  for (int64_t c = 0; c < n; c += kLanes) {
    hn::Store(hn::MulAdd(a, hn::Load(f, from + c), hn::Load(f, to + c)), f, to + c);
  }
}

/// Stores dK and dV of `keys` keys. Since Q K^T was scaled, dK is scaled here, and dQ in
/// backward_dq().
template <class Scratch>
void store_key_gradients(const Task& task, const BackwardArgs& args, int64_t key_begin,
                         int64_t keys, const Scratch& s) {
  const Problem& p = task.problem;
  if (!p.wants_dk_dv()) return;
  const auto scale = static_cast<float>(p.scale);
  for (int64_t i = 0; i < keys * s.ldk; ++i) s.dK[i] *= scale;
  for (int64_t key = 0; key < keys; ++key) {
    const int64_t row = task.s.k_begin + key_begin + key;
    store_row(args.dk.dtype, s.dK + key * s.ldk, p.d,
              address(args.dk, p.dk.offset(task.b, row, task.kv)));
    store_row(args.dv.dtype, s.dV + key * s.ldv, p.dv,
              address(args.dv, p.dv_grad.offset(task.b, row, task.kv)));
  }
}

/// dV += P^T dO, dK += dS^T Q, dQ += dS K (lines 12, 16, 15) where an operand has inf or NaN: only
/// keys that a row sees are multiplied.
HWY_NOINLINE inline void accumulate_visible_gradients(const Problem& p, const RowTile& row_tile,
                                                      const KeyTile& tile, const BackwardScratch& s,
                                                      int64_t first_key, float* HWY_RESTRICT dq) {
  const auto [j, n, partial] = tile;
  const int64_t width = row_tile.width();
  const bool of_rows = p.wants_dq(), of_keys = p.wants_dk_dv();
  for (int64_t r = 0; r < row_tile.count; ++r) {
    for (int64_t jj = 0; jj < n; ++jj) {
      if (!row_tile.mask.sees(r, j + jj)) continue;
      const int64_t key = j - first_key + jj;
      if (of_keys) add_row(s.Pz[jj * width + r], s.dO + r * s.ldv, s.ldv, s.dV + key * s.ldv);
      if (of_keys) add_row(s.dS[jj * width + r], s.Q + r * s.ldk, s.ldk, s.dK + key * s.ldk);
      if (of_rows) add_row(s.dS[jj * width + r], s.K + key * s.ldk, s.ldk, dq + r * s.ldk);
    }
  }
}

inline void backward(const Task& task, const BackwardArgs& args, int64_t key_begin, int64_t key_end,
                     const float* D, float* dq, float* scratch) {
  const Problem& p = task.problem;
  Arena arena(scratch);
  const BackwardScratch s(p, arena);
  const kernels::DropoutMask& dropout = task.given.dropout;
  HWY_ALIGN float lse2[kBr], d_row[kBr];
  TaskExpressions expressions(task, scratch);

  const int64_t keys = key_end - key_begin;
  for (int64_t key = 0; key < keys; key += kBc) {
    expressions.set_columns(key_begin + key, std::min(kBc, keys - key), key / kBc);
  }
  const bool finite_k = load_keys(task, args.k, p.k, p.d, key_begin, keys, s.K, s.ldk);
  load_keys(task, args.v, p.v, p.dv, key_begin, keys, s.V, s.ldv);
  std::fill_n(s.dK, keys * s.ldk, 0.0f);
  std::fill_n(s.dV, keys * s.ldv, 0.0f);

  for (int64_t row = 0; row < task.rows(); row += kBr) {
    RowTile row_tile;
    make_row_tile(task, row, std::min(task.rows(), row + kBr), &row_tile);
    KeyTiles tiles = row_tile.mask.tiles({key_begin, key_end});
    expressions.set_rows(row_tile, row, 0);
    expressions.skip_hidden(0, &tiles);
    if (tiles.done()) continue;
    const int64_t width = row_tile.width();
    bool finite = finite_k;
    finite &= load_queries(task, args.q, p.q, p.d, row, row_tile.count, width, s.Q, s.ldk);
    finite &= load_queries(task, args.dout, p.dout, p.dv, row, row_tile.count, width, s.dO, s.ldv);
    transpose(s.Q, s.ldk, width, p.d, query_factor(p), s.Qt, width);
    transpose(s.dO, s.ldv, width, p.dv, 1, s.dOt, width);
    for (int64_t r = 0; r < width; ++r) {
      const float lse = r < row_tile.count ? lse_at(task, args.lse, p.lse, row + r) : 0;
      // exp2(S + inf) would be inf where a row saw nothing; its P is 0.
      lse2[r] = std::isinf(lse) ? std::numeric_limits<float>::infinity() : lse * kLog2e;
      d_row[r] = r < row_tile.count ? D[row + r] : 0;
    }
    float* dq_row_tile = dq + row * s.ldk;

    const auto next = [&] {
      tiles.next();
      expressions.skip_hidden(0, &tiles);
    };
    for (; !tiles.done(); next()) {
      const KeyTile tile = tiles.tile();
      const int64_t columns = (tile.j - key_begin) / kBc;
      if (!begin_tile(task, expressions, 0, columns, tile, s.bias, &row_tile)) continue;
      const int64_t n = tile.n, key = tile.j - key_begin;
      // dbias of this tile, and the bias of the next.
      const int64_t parts = 2 * n / kBlockRows<3> + 1;
      RowPrefetch dbias = bias_prefetch(task.given.dbias.data, task.given.dbias.at,
                                        row_tile.dbias_row, row_tile.count, tile.j, n, parts);
      RowPrefetch bias =
          bias_prefetch(task.given.bias.data, p.bias, row_tile.bias_row, row_tile.bias_count(),
                        tile.j + kBc, std::min(kBc, key_end - tile.j - kBc), parts);
      const float *K = s.K + key * s.ldk, *V = s.V + key * s.ldv;
      float *dK = s.dK + key * s.ldk, *dV = s.dV + key * s.ldv;
      gemm<Init::kZero>(n, row_tile.vectors, p.d, {K, s.ldk, 1}, {s.Qt, width}, s.P, width, nullptr,
                        &dbias);
      score_rule(p, expressions, 0, columns, tile, s.P, width, s.slope, s.bias, &row_tile);
      probabilities(row_tile, tile, s.P, lse2);
      gemm<Init::kZero>(n, row_tile.vectors, p.dv, {V, s.ldv, 1}, {s.dOt, width}, s.dS, width,
                        nullptr, &dbias);
      dbias.finish();
      if (p.dropout_p > 0) {
        std::copy_n(s.P, n * width, s.Pz);
        drop(dropout, static_cast<float>(1 / (1 - p.dropout_p)), row_tile, tile, width, s.Pz, s.dS);
      }
      score_gradient(row_tile, tile, s.P, d_row, s.slope, s.dS, s.dBias);
      if (p.has(Arg::kDbias)) add_bias_gradient(task.given.dbias, row_tile, tile, s.dBias);
      expressions.add_gradients(row_tile, tile, s.dBias);
      if (row_tile.mask.hides(tile) && !finite) {
        accumulate_visible_gradients(p, row_tile, tile, s, key_begin, dq_row_tile);
        continue;
      }
      if (p.wants_dk_dv()) {
        gemm<Init::kAdd>(n, s.ldv / kLanes, row_tile.count, {s.Pz, width, 1}, {s.dO, s.ldv}, dV,
                         s.ldv, nullptr, &bias);
        gemm<Init::kAdd>(n, s.ldk / kLanes, row_tile.count, {s.dS, width, 1}, {s.Q, s.ldk}, dK,
                         s.ldk, nullptr, &bias);
      }
      if (!p.wants_dq()) continue;
      gemm<Init::kAdd>(row_tile.count, s.ldk / kLanes, n, {s.dS, 1, width}, {K, s.ldk}, dq_row_tile,
                       s.ldk, nullptr, &bias);
    }
  }

  store_key_gradients(task, args, key_begin, keys, s);
}

inline void backward_dq(const Task& task, const BackwardArgs& args, int64_t row_begin,
                        int64_t row_end, float* const* dq, int64_t parts) {
  const F32 f;
  const Problem& p = task.problem;
  const int64_t ld = dq_stride(p);
  HWY_ALIGN float sum[kMaxDim + kLanes];
  for (int64_t r = row_begin; r < row_end; ++r) {
    for (int64_t c = 0; c < ld; c += kLanes) {
      V32 total = hn::Zero(f);
      for (int64_t i = 0; i < parts; ++i) total = hn::Add(total, hn::Load(f, dq[i] + r * ld + c));
      hn::Store(hn::Mul(total, hn::Set(f, static_cast<float>(p.scale))), f, sum + c);
    }
    store_row(args.dq.dtype, sum, p.d, address(args.dq, row_offset(task, p.dq, r)));
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
