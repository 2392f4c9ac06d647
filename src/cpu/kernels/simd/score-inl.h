// The score hook of the CPU's kernels: softcap, ALiBi, expressions and a dense bias change the
// products of Q and K before the softmax.
#if defined(FULGUR_CPU_SCORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_SCORE_INL_H_
#undef FULGUR_CPU_SCORE_INL_H_
#else
#define FULGUR_CPU_SCORE_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include "cpu/kernels/simd/bias-inl.h"
#include "cpu/kernels/simd/expression-inl.h"
#include "cpu/kernels/simd/row_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The factor of Q in front of the product with K: the scale, and where no softcap follows, the
/// way to log2 units.
inline float query_factor(const Problem& p) {
  return static_cast<float>(p.softcap > 0 ? p.scale : p.scale * 1.4426950408889634);
}

/// Whether scores are products times the factor, after a dense bias over the scale has been added
/// to the products. A small scale would make that overflow.
inline bool only_scales(const Problem& p) {
  constexpr double kLeast = 0x1p-12;
  return p.softcap == 0 && !p.has(Arg::kAlibiSlopes) && (!p.has(Arg::kBias) || p.scale >= kLeast);
}

/// Whether the derivative of a score by its scaled product is not 1 everywhere.
inline bool has_score_slope(const Problem& p) {
  return p.softcap > 0 || p.expressions.changes_scores();
}

/// S = softcap tanh(S / softcap). `slope`, if not null, takes the derivative 1 - tanh^2.
HWY_INLINE void softcap_scores(const Problem& p, int64_t vectors, int64_t n, float* HWY_RESTRICT S,
                               int64_t ld, float* HWY_RESTRICT slope) {
  const F32 f;
  // Softcaps beyond these have the results of these in f32: scores of 0, and scores without a cap.
  // They, or their reciprocals, would not be normal numbers.
  const double softcap = std::clamp(p.softcap, 1e-37, 1e37);
  const V32 cap = hn::Set(f, static_cast<float>(softcap * 1.4426950408889634));
  const V32 per_cap = hn::Set(f, static_cast<float>(1 / softcap));
  for (int64_t jj = 0; jj < n; ++jj) {
    for (int64_t v = 0; v < vectors; ++v) {
      float* at = S + jj * ld + v * kLanes;
      const V32 t = hn::Tanh(f, hn::Mul(per_cap, hn::Load(f, at)));
      hn::Store(hn::Mul(cap, t), f, at);
      if (slope != nullptr) {
        hn::Store(hn::NegMulAdd(t, t, hn::Set(f, 1.0f)), f, slope + (at - S));
      }
    }
  }
}

/// S -= slope |distance of the key from the row's diagonal|, which has the derivative 1.
HWY_INLINE void alibi_scores(const RowTile& row_tile, const KeyTile& tile, float* HWY_RESTRICT S,
                             int64_t ld) {
  const F32 f;
  for (int64_t v = 0; v < row_tile.vectors; ++v) {
    HWY_ALIGN float diagonal[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      diagonal[lane] = static_cast<float>(row_tile.diagonal[v * kLanes + lane] - tile.j);
    }
    const V32 slope = hn::Load(f, row_tile.slope + v * kLanes), at_diagonal = hn::Load(f, diagonal);
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      float* at = S + jj * ld + v * kLanes;
      const V32 distance = hn::Abs(hn::Sub(at_diagonal, hn::Set(f, static_cast<float>(jj))));
      hn::Store(hn::NegMulAdd(slope, distance, hn::Load(f, at)), f, at);
    }
  }
}

/// Turns the scaled products S [n][ld] of a tile into scores in log2 units, with -inf for the keys
/// that the mask hides. `slope`, if not null, takes the derivatives of the scores by the scaled
/// products; it is null where they are not wanted, or all 1.
HWY_INLINE void score_rule(const Problem& p, const KeyTile& tile, float* HWY_RESTRICT S, int64_t ld,
                           float* HWY_RESTRICT slope, RowTile* row_tile) {
  if (p.softcap > 0) softcap_scores(p, row_tile->vectors, tile.n, S, ld, slope);
  if (p.has(Arg::kAlibiSlopes)) alibi_scores(*row_tile, tile, S, ld);
  add_bias(p, tile, kLog2e, S, ld, row_tile);
  hide_scores(row_tile->mask, row_tile->vectors, tile, S, ld);
}

/// Prepares the bias and the mask of expressions of a tile; returns whether some row of a row tile
/// sees some key. `bias` is memory for a tile.
HWY_INLINE bool begin_tile(const Task& task, TaskExpressions& expressions, int64_t number,
                           int64_t columns, const KeyTile& tile, float* bias, RowTile* row_tile) {
  if (task.problem.has(Arg::kBias)) {
    if (!load_bias(task, tile, expressions.given(), bias, row_tile)) return false;
  } else if (expressions.given()) {
    row_tile->bias = nullptr;
    row_tile->bias_step = row_tile->width();
    row_tile->mask.hide(nullptr, tile.j, row_tile->width());
  }
  return !expressions.masks() || expressions.mask(tile, number, columns, bias, row_tile);
}

/// score_rule() with expressions that change scores. It is not inlined, so that the compiler makes
/// better code of the loops of calls without expressions.
HWY_NOINLINE inline void score_rule_of_expressions(const Problem& p, TaskExpressions& expressions,
                                                   int64_t number, int64_t columns,
                                                   const KeyTile& tile, float* HWY_RESTRICT S,
                                                   int64_t ld, float* HWY_RESTRICT slope,
                                                   float* bias, RowTile* row_tile) {
  if (p.softcap > 0) softcap_scores(p, row_tile->vectors, tile.n, S, ld, slope);
  if (p.has(Arg::kAlibiSlopes)) alibi_scores(*row_tile, tile, S, ld);
  expressions.change_scores(tile, number, columns, S, ld, slope, p.softcap > 0, bias, row_tile);
  add_bias(p, tile, kLog2e, S, ld, row_tile);
  hide_scores(row_tile->mask, row_tile->vectors, tile, S, ld);
}

/// score_rule() of a task that may have expressions, for the row tile and the key tile of these
/// numbers.
HWY_INLINE void score_rule(const Problem& p, TaskExpressions& expressions, int64_t number,
                           int64_t columns, const KeyTile& tile, float* HWY_RESTRICT S, int64_t ld,
                           float* HWY_RESTRICT slope, float* bias, RowTile* row_tile) {
  if (!expressions.changes_scores()) return score_rule(p, tile, S, ld, slope, row_tile);
  score_rule_of_expressions(p, expressions, number, columns, tile, S, ld, slope, bias, row_tile);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
