// A dense bias of the CPU's kernels: what the scores of a panel and a tile take, and which keys are
// hidden because that is -inf.
#if defined(FULGUR_CPU_BIAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_BIAS_INL_H_
#undef FULGUR_CPU_BIAS_INL_H_
#else
#define FULGUR_CPU_BIAS_INL_H_
#endif

#include <optional>

#include "cpu/kernels/simd/panel-inl.h"
#include "kernels/host_device/score.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// kSquare keys of a row, as floats. Of bools 0 where true and -inf where false.
template <DType kDType>
HWY_INLINE hn::Vec<Square> load_bias_keys(const void* from) {
  const Square f;
  if constexpr (kDType == DType::kBool) {
    const hn::RebindToSigned<Square> i;
    const hn::Rebind<uint8_t, Square> bytes;
    const auto seen = hn::PromoteTo(i, hn::LoadU(bytes, static_cast<const uint8_t*>(from)));
    const auto hidden = hn::RebindMask(f, hn::Eq(seen, hn::Zero(i)));
    return hn::IfThenElseZero(hidden, hn::Set(f, -std::numeric_limits<float>::infinity()));
  } else {
    return load_wide<kDType, Square>(from);
  }
}

/// The first n keys of a row, whose elements are `stride` bytes apart; the last of them again in
/// the lanes after them.
template <DType kDType>
HWY_INLINE hn::Vec<Square> gather_bias_keys(const char* from, int64_t stride, int64_t n) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : kDType == DType::kBool ? 1 : 2;
  alignas(64) char keys[kSquare * kSize];
  for (int64_t i = 0; i < kSquare; ++i) {
    std::memcpy(keys + i * kSize, from + std::min(i, n - 1) * stride, kSize);
  }
  return load_bias_keys<kDType>(keys);
}

/// Rows of a bias, one a lane of a panel: where their keys lie, from key j on.
struct BiasRows {
  const char* at[kPanelRows];
  int64_t stride;  // bytes from a key to the next

  BiasRows(const Task& task, const Panel& panel, int64_t j) {
    const ConstTensor& bias = task.given.bias;
    const int64_t size = size_of(bias.dtype);
    stride = task.problem.bias.key * size;
    const char* const keys = static_cast<const char*>(bias.data) + j * stride;
    for (int64_t lane = 0; lane < panel.width(); ++lane) {
      at[lane] = keys + panel.bias_row[std::min(lane, panel.count - 1)] * size;
    }
  }
};

/// Asks for a half of the keys from j on of a bias, or its gradient, whose rows lie at `rows`,
/// while products are computed: more reads than are in flight at a time would keep them waiting.
HWY_INLINE void ask_for_bias(const void* data, const Problem::Bias& at, const int64_t* rows,
                             int64_t count, int64_t j, int half) {
  if (at.key != 1) return;
  const int64_t size = size_of(at.dtype), bytes = kBc * size;
  const char* const from = static_cast<const char*>(data) + j * size;
  for (int64_t lane = 0; lane < count; ++lane) {
    const char* const row = from + rows[lane] * size;
    for (int64_t byte = half * 64; byte < bytes; byte += 128) __builtin_prefetch(row + byte, 0, 2);
  }
}

/// What a bias is in a tile.
struct BiasOfTile {
  bool is_zero, hides_some, hides_all;
};

/// The bias of the rows of a panel, one a lane, and of n keys: to [n][width], -inf where it hides a
/// key.
template <DType kDType>
HWY_INLINE BiasOfTile load_bias_tile(const BiasRows& rows, int64_t n, int64_t width,
                                     float* HWY_RESTRICT to) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : kDType == DType::kBool ? 1 : 2;
  const Square f;
  const hn::RebindToUnsigned<Square> u;
  const auto hiding = hn::Set(f, static_cast<float>(kernels::kHidingBias));
  const auto none = hn::Set(f, -std::numeric_limits<float>::infinity());
  // Of the bits: none is larger than those of -inf but of a NaN.
  auto any = hn::Zero(u), every = hn::Not(hn::Zero(u)), largest = hn::Zero(u);
  const auto add_square = [&](int64_t lane, int64_t jj, int64_t count, const auto& keys) HWY_ATTR {
    hn::Vec<Square> x[kSquare];
    FULGUR_UNROLL for (int i = 0; i < kSquare; ++i) {
      x[i] = keys(rows.at[lane + i] + jj * rows.stride);
      if constexpr (kDType == DType::kF32 || kDType == DType::kBF16) {
        x[i] = hn::IfThenElse(hn::Lt(x[i], hiding), none, x[i]);
      }
      const auto bits = hn::BitCast(u, x[i]);
      any = hn::Or(any, bits);
      every = hn::And(every, bits);
      largest = hn::Max(largest, bits);
    }
    transpose(x);
    float* const square = to + jj * width + lane;
    if (count == kSquare) {
      FULGUR_UNROLL for (int i = 0; i < kSquare; ++i) hn::StoreU(x[i], f, square + i * width);
    } else {
      for (int64_t i = 0; i < count; ++i) hn::StoreU(x[i], f, square + i * width);
    }
  };
  for (int64_t lane = 0; lane < width; lane += kSquare) {
    int64_t jj = 0;
    for (; rows.stride == kSize && jj + kSquare <= n; jj += kSquare) {
      add_square(lane, jj, kSquare,
                 [](const char* from) HWY_ATTR { return load_bias_keys<kDType>(from); });
    }
    for (; jj < n; jj += kSquare) {
      const int64_t count = std::min(kSquare, n - jj);
      add_square(lane, jj, count, [&](const char* from) HWY_ATTR {
        return gather_bias_keys<kDType>(from, rows.stride, count);
      });
    }
  }
  const auto hidden = hn::Set(u, 0xff800000);
  const auto all = [&](auto mask) HWY_ATTR { return hn::AllTrue(u, mask); };
  return {.is_zero = all(hn::Eq(hn::Add(any, any), hn::Zero(u))),  // of either sign
          .hides_some = !all(hn::Lt(largest, hidden)),
          .hides_all = all(hn::And(hn::Eq(every, hidden), hn::Eq(largest, hidden)))};
}

/// Likewise of bools, kBc side by side in each row. Most tiles are of true or of false alone, and
/// then nothing is loaded.
HWY_INLINE BiasOfTile load_bool_tile(const BiasRows& rows, int64_t width, float* HWY_RESTRICT to) {
  const hn::CappedTag<uint8_t, kBc> b;
  auto least = hn::Not(hn::Zero(b)), most = hn::Zero(b);
  for (int64_t lane = 0; lane < width; ++lane) {
    for (size_t jj = 0; jj < kBc; jj += hn::Lanes(b)) {
      const auto seen = hn::LoadU(b, reinterpret_cast<const uint8_t*>(rows.at[lane]) + jj);
      least = hn::Min(least, seen);
      most = hn::Max(most, seen);
    }
  }
  const bool hides_some = !hn::AllFalse(b, hn::Eq(least, hn::Zero(b)));
  const bool hides_all = hn::AllTrue(b, hn::Eq(most, hn::Zero(b)));
  if (!hides_some || hides_all) return {!hides_some, hides_some, hides_all};
  return load_bias_tile<DType::kBool>(rows, kBc, width, to);
}

/// What a bias of floats is in a tile that has one number alone, which hides or is 0, as most tiles
/// of a mask; nothing of other tiles. Ends at the first other number.
template <DType kDType>
HWY_INLINE std::optional<BiasOfTile> uniform_tile(const BiasRows& rows, int64_t width) {
  using Bits = std::conditional_t<kDType == DType::kF32, uint32_t, uint16_t>;
  const hn::CappedTag<Bits, kBc> b;
  Bits first;
  std::memcpy(&first, rows.at[0], sizeof first);
  const bool hides = load_element(&first, kDType, 0) < kernels::kHidingBias;
  if (!hides && first != 0) return {};
  const auto one = hn::Set(b, first);
  for (int64_t lane = 0; lane < width; ++lane) {
    const auto* const keys = reinterpret_cast<const Bits*>(rows.at[lane]);
    auto same = hn::Eq(hn::LoadU(b, keys), one);
    for (size_t jj = hn::Lanes(b); jj < kBc; jj += hn::Lanes(b)) {
      same = hn::And(same, hn::Eq(hn::LoadU(b, keys + jj), one));
    }
    if (!hn::AllTrue(b, same)) return {};
  }
  return BiasOfTile{!hides, hides, hides};
}

/// Whether some row of a panel sees some key of a tile in spite of the bias. If so, the panel has
/// the bias of the tile, which is loaded to `to`, or none where that is 0.
HWY_NOINLINE inline bool load_bias(const Task& task, const KeyTile& tile, float* to, Panel* panel) {
  const BiasRows rows(task, *panel, tile.j);
  const bool dense = tile.n == kBc && rows.stride == size_of(task.given.bias.dtype);
  const auto load = [&](auto dtype) HWY_ATTR {
    if constexpr (dtype() == DType::kBool) {
      if (dense) return load_bool_tile(rows, panel->width(), to);
    } else if (dense) {
      if (const auto uniform = uniform_tile<dtype()>(rows, panel->width())) return *uniform;
    }
    return load_bias_tile<dtype()>(rows, tile.n, panel->width(), to);
  };
  BiasOfTile is;
  switch (task.given.bias.dtype) {
    case DType::kBool:
      is = load(std::integral_constant<DType, DType::kBool>());
      break;
    case DType::kF16:
      is = load(std::integral_constant<DType, DType::kF16>());
      break;
    case DType::kBF16:
      is = load(std::integral_constant<DType, DType::kBF16>());
      break;
    default:
      is = load(std::integral_constant<DType, DType::kF32>());
  }
  // What says so of a tile at once has loaded nothing.
  if (is.hides_all)
    std::fill_n(to, tile.n * panel->width(), -std::numeric_limits<float>::infinity());
  panel->bias = is.is_zero ? nullptr : to;
  panel->mask.hide(is.hides_some ? to : nullptr, tile.j, panel->width());
  return !is.hides_all;
}

/// Adds dS [kBc][width] of a tile, the gradient of its scores, to that of the bias. `rows` is
/// memory for [kPanelRows][kBc].
HWY_NOINLINE inline void add_bias_gradient(const BiasSums& sums, float* rows, const Panel& panel,
                                           const KeyTile& tile, const float* HWY_RESTRICT dS) {
  const F32 f;
  const DType dtype = sums.at.dtype;
  const int64_t stride = sums.at.key;
  const int64_t n = tile.n, whole = n / kLanes * kLanes;
  transpose(dS, panel.width(), kBc, panel.width(), 1, rows, kBc);
  for (int64_t lane = 0; lane < panel.count; ++lane) {
    const float* const from = rows + lane * kBc;
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

/// S + bias, which has the derivative 1; -inf where that is, whatever S is.
HWY_INLINE void add_bias(const Panel& panel, const KeyTile& tile, float* HWY_RESTRICT S,
                         int64_t ld) {
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V32 log2e = hn::Set(f, kLog2e);
  const auto add = [&](const auto& sum) HWY_ATTR {
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      for (int64_t v = 0; v < panel.vectors; ++v) {
        float* at = S + jj * ld + v * kLanes;
        const V32 bias = hn::Load(f, panel.bias + jj * panel.width() + v * kLanes);
        hn::Store(sum(hn::Load(f, at), bias), f, at);
      }
    }
  };
  if (panel.mask.hides()) {
    add([&](V32 x, V32 b)
            HWY_ATTR { return hn::IfThenElse(hn::Eq(b, none), b, hn::MulAdd(b, log2e, x)); });
  } else {
    add([&](V32 x, V32 b) HWY_ATTR { return hn::MulAdd(b, log2e, x); });
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
