// A dense bias of the CPU's kernels: what the scores of a panel and a tile take, and which keys are
// hidden because that is -inf.
#if defined(FULGUR_CPU_BIAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_BIAS_INL_H_
#undef FULGUR_CPU_BIAS_INL_H_
#else
#define FULGUR_CPU_BIAS_INL_H_
#endif

#include "cpu/kernels/simd/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The bias of a row and n keys from element `at` on, as floats; `to` has room for whole vectors.
HWY_INLINE void load_bias_row(const ConstTensor& bias, int64_t at, int64_t stride, int64_t n,
                              float* HWY_RESTRICT to) {
  if (bias.dtype == DType::kBool) {
    const auto* seen = static_cast<const uint8_t*>(bias.data) + at;
    for (int64_t jj = 0; jj < n; ++jj) {
      to[jj] = seen[jj * stride] != 0 ? 0 : -std::numeric_limits<float>::infinity();
    }
  } else if (stride == 1) {
    load_rows(bias.dtype, address(bias, at), 0, 1, n, to, round_up(n, kLanes));
  } else {
    for (int64_t jj = 0; jj < n; ++jj) {
      to[jj] = static_cast<float>(load_element(bias.data, bias.dtype, at + jj * stride));
    }
  }
}

/// Bits of the n numbers that are -inf.
HWY_INLINE uint64_t hidden_keys(const float* HWY_RESTRICT bias, int64_t n) {
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
  uint64_t hidden = 0;
  for (int64_t jj = 0; jj < n; jj += kLanes) {
    uint64_t bits = 0;
    hn::StoreMaskBits(f, hn::Eq(hn::Load(f, bias + jj), none), reinterpret_cast<uint8_t*>(&bits));
    hidden |= bits << jj;
  }
  return n == 64 ? hidden : hidden & ((uint64_t{1} << n) - 1);
}

/// Whether some row of a panel sees some key of a tile in spite of the bias. If so, the panel has
/// the bias of the tile, which is partial where keys are hidden.
HWY_NOINLINE inline bool load_bias(const Task& task, const BiasScratch& s, Panel* panel,
                                   KeyTile* tile) {
  static_assert(kBc == 64);  // bits of a word
  const int64_t stride = task.problem.bias.key;
  const uint64_t all = ~uint64_t{0} >> (kBc - tile->n);
  uint64_t hidden = 0, hidden_of_every_row = all;
  panel->mask.begin_tile(tile->j);
  for (int64_t lane = 0; lane < panel->width(); ++lane) {
    float* const row = s.rows + lane * kBc;
    if (lane >= panel->count) {
      std::fill_n(row, kBc, 0.0f);
      continue;
    }
    uint64_t of_row;
    if (lane > 0 && panel->bias_row[lane] == panel->bias_row[lane - 1]) {
      std::copy_n(row - kBc, kBc, row);
      of_row = hidden;
    } else {
      load_bias_row(task.given.bias, panel->bias_row[lane] + tile->j * stride, stride, tile->n,
                    row);
      of_row = hidden_keys(row, tile->n);
    }
    hidden = of_row;
    hidden_of_every_row &= of_row;
    tile->partial |= of_row != 0;
    panel->mask.hide(lane, of_row);
  }
  if (hidden_of_every_row == all) return false;
  transpose(s.rows, kBc, panel->width(), tile->n, kLog2e, s.tile, panel->width());
  panel->bias = s.tile;
  return true;
}

/// Adds dS [kBc][width] of a tile, the gradient of its scores, to that of the bias.
HWY_NOINLINE inline void add_bias_gradient(const BiasSums& sums, const BiasScratch& s,
                                           const Panel& panel, const KeyTile& tile,
                                           const float* HWY_RESTRICT dS) {
  const F32 f;
  const auto [dtype, batch, head, row, stride] = sums.at;
  const int64_t n = tile.n, whole = n / kLanes * kLanes;
  transpose(dS, panel.width(), kBc, panel.width(), 1, s.rows, kBc);
  for (int64_t lane = 0; lane < panel.count; ++lane) {
    const float* const from = s.rows + lane * kBc;
    const int64_t at = panel.dbias_row[lane] + tile.j * stride;
    if (dtype != DType::kF32) {
      for (int64_t jj = 0; jj < n; ++jj)
        store_element(sums.data, dtype, at + jj * stride, from[jj]);
      continue;
    }
    float* const to = static_cast<float*>(sums.data) + at;
    if (stride != 1) {
      for (int64_t jj = 0; jj < n; ++jj) to[jj * stride] += from[jj];
      continue;
    }
    for (int64_t jj = 0; jj < whole; jj += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(f, to + jj), hn::Load(f, from + jj)), f, to + jj);
    }
    for (int64_t jj = whole; jj < n; ++jj) to[jj] += from[jj];
  }
}

/// S + bias, which has the derivative 1.
HWY_INLINE void add_bias(const Panel& panel, const KeyTile& tile, float* HWY_RESTRICT S,
                         int64_t ld) {
  const F32 f;
  for (int64_t jj = 0; jj < tile.n; ++jj) {
    for (int64_t v = 0; v < panel.vectors; ++v) {
      float* at = S + jj * ld + v * kLanes;
      const V32 bias = hn::Load(f, panel.bias + jj * panel.width() + v * kLanes);
      hn::Store(hn::Add(hn::Load(f, at), bias), f, at);
    }
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
