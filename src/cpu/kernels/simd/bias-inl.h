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

  BiasRows(const void* data, const Problem::Bias& layout, const Panel& panel, int64_t j) {
    const int64_t size = size_of(layout.dtype);
    stride = layout.key * size;
    const char* const keys = static_cast<const char*>(data) + j * stride;
    for (int64_t lane = 0; lane < panel.width(); ++lane) {
      at[lane] = keys + panel.bias_row[std::min(lane, panel.count - 1)] * size;
    }
  }
  /// Whether the keys of each row lie side by side.
  bool dense(DType dtype) const { return stride == size_of(dtype); }
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

/// Finds that of vectors of it.
template <class D>
class BiasCensus {
 public:
  // No default member initializers: these would be compiled for the least of all CPUs.
  HWY_INLINE BiasCensus()
      : any_(hn::Zero(U())), every_(hn::Not(hn::Zero(U()))), largest_(hn::Zero(U())) {}
  /// -inf where x is a number that hides.
  static HWY_INLINE hn::Vec<D> hide(hn::Vec<D> x) {
    const D f;
    const auto hidden = hn::Lt(x, hn::Set(f, static_cast<float>(kernels::kHidingBias)));
    return hn::IfThenElse(hidden, hn::Set(f, -std::numeric_limits<float>::infinity()), x);
  }
  HWY_INLINE void add(hn::Vec<D> x) {
    const auto bits = hn::BitCast(U(), x);
    any_ = hn::Or(any_, bits);
    every_ = hn::And(every_, bits);
    largest_ = hn::Max(largest_, bits);
  }
  HWY_INLINE BiasOfTile result() const {
    const U u;
    const auto hidden = hn::Set(u, 0xff800000);  // fewer than those of a NaN alone
    const auto all = [&](auto mask) HWY_ATTR { return hn::AllTrue(u, mask); };
    return {.is_zero = all(hn::Eq(hn::Add(any_, any_), hn::Zero(u))),  // of either sign
            .hides_some = !all(hn::Lt(largest_, hidden)),
            .hides_all = all(hn::And(hn::Eq(every_, hidden), hn::Eq(largest_, hidden)))};
  }

 private:
  using U = hn::RebindToUnsigned<D>;
  hn::Vec<U> any_, every_, largest_;
};

/// Four words, 16 bytes, of each of the rows of a vector, `offset` bytes after at[lane]: word i of
/// them in x[i], one row a lane.
HWY_INLINE void load_words(const char* const* at, int64_t offset, V32 (&x)[4]) {
  const F32 f;
  const hn::CappedTag<float, 4> block;
  const hn::Repartition<double, F32> pairs;
  const auto words = [&](int lane) HWY_ATTR {
    return hn::LoadU(block, reinterpret_cast<const float*>(at[lane] + offset));
  };
  // Rows i, i + 4, .. in the blocks of x[i]: then no word has to change its block.
  FULGUR_UNROLL for (int i = 0; i < 4; ++i) {
#if HWY_TARGET == HWY_AVX3
    __m512 blocks = _mm512_castps128_ps512(words(i).raw);
    blocks = _mm512_insertf32x4(blocks, words(i + 4).raw, 1);
    blocks = _mm512_insertf32x4(blocks, words(i + 8).raw, 2);
    x[i] = V32{_mm512_insertf32x4(blocks, words(i + 12).raw, 3)};
#elif HWY_MAX_BYTES == 32
    x[i] = hn::Combine(f, words(i + 4), words(i));
#else
    x[i] = words(i);
#endif
  }
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(f, x[0], x[1]));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(f, x[0], x[1]));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(f, x[2], x[3]));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(f, x[2], x[3]));
  x[0] = hn::BitCast(f, hn::InterleaveLower(pairs, low01, low23));
  x[1] = hn::BitCast(f, hn::InterleaveUpper(pairs, low01, low23));
  x[2] = hn::BitCast(f, hn::InterleaveLower(pairs, high01, high23));
  x[3] = hn::BitCast(f, hn::InterleaveUpper(pairs, high01, high23));
}

/// Calls body(jj, v, x) for each key of a whole tile and each vector of a panel: x is their bias,
/// one row a lane. The rows are dense.
template <DType kDType, class Body>
HWY_INLINE void for_numbers(const BiasRows& rows, int64_t vectors, const Body& body) {
  static_assert(kDType == DType::kF32 || kDType == DType::kBF16);
  const F32 f;
  const U32 u;
  constexpr int kWords = 4, kEach = kDType == DType::kF32 ? 1 : 2;  // numbers in a word
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t jj = 0; jj < kBc; jj += kWords * kEach) {
      V32 words[kWords];
      load_words(rows.at + v * kLanes, jj * (4 / kEach), words);
      FULGUR_UNROLL for (int i = 0; i < kWords; ++i) {
        if constexpr (kEach == 1) {
          body(jj + i, v, words[i]);
        } else {
          const auto both = hn::BitCast(u, words[i]);
          body(jj + 2 * i, v, hn::BitCast(f, hn::ShiftLeft<16>(both)));
          body(jj + 2 * i + 1, v, hn::BitCast(f, hn::And(both, hn::Set(u, 0xffff0000))));
        }
      }
    }
  }
}

/// The bias of the rows of a panel, one a lane, and of n keys: to [n][width], -inf where it hides a
/// key.
template <DType kDType>
HWY_INLINE BiasOfTile load_bias_tile(const BiasRows& rows, int64_t n, int64_t width,
                                     float* HWY_RESTRICT to) {
  constexpr bool kMayBeFinite = kDType == DType::kF32 || kDType == DType::kBF16;
  if constexpr (kMayBeFinite) {
    if (n == kBc && rows.dense(kDType)) {
      BiasCensus<F32> census;
      for_numbers<kDType>(rows, width / kLanes, [&](int64_t jj, int64_t v, V32 x) HWY_ATTR {
        x = census.hide(x);
        census.add(x);
        hn::Store(x, F32(), to + jj * width + v * kLanes);
      });
      return census.result();
    }
  }
  const Square f;
  BiasCensus<Square> census;
  const auto add_square = [&](int64_t lane, int64_t jj, int64_t count, const auto& keys) HWY_ATTR {
    hn::Vec<Square> x[kSquare];
    FULGUR_UNROLL for (int i = 0; i < kSquare; ++i) {
      x[i] = keys(rows.at[lane + i] + jj * rows.stride);
      if constexpr (kMayBeFinite) x[i] = census.hide(x[i]);
      census.add(x[i]);
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
    for (; rows.dense(kDType) && jj + kSquare <= n; jj += kSquare) {
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
  return census.result();
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

/// The bits of an element of a bias of floats.
template <DType kDType>
using BiasBits = std::conditional_t<kDType == DType::kF32, uint32_t, uint16_t>;

/// What a bias of floats is in a tile that has one number alone, which hides or is 0, as most tiles
/// of a mask; nothing of other tiles. Ends at the first other number.
template <DType kDType>
HWY_INLINE std::optional<BiasOfTile> uniform_tile(const BiasRows& rows, int64_t width) {
  using Bits = BiasBits<kDType>;
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

/// Whether a bias of floats hides no key in a whole tile.
template <DType kDType>
HWY_INLINE bool hides_none(const BiasRows& rows, int64_t width) {
  using Bits = BiasBits<kDType>;
  const hn::CappedTag<Bits, kBc> b;
  // As unsigned numbers the bits of what hides are larger than those of what does not, but for
  // NaNs.
  static_assert(kernels::kHidingBias == -0x1p115);
  const auto bound = hn::Set(b, static_cast<Bits>(kDType == DType::kF32 ? 0xf9000000 : 0xf900));
  auto most = hn::Zero(b);
  for (int64_t lane = 0; lane < width; ++lane) {
    const auto* const keys = reinterpret_cast<const Bits*>(rows.at[lane]);
    for (size_t jj = 0; jj < kBc; jj += hn::Lanes(b)) most = hn::Max(most, hn::LoadU(b, keys + jj));
  }
  return hn::AllTrue(b, hn::Eq(hn::Max(most, bound), bound));
}

/// The bias of n keys that is the same for all rows: to [kBc], -inf where it hides a key.
template <DType kDType>
HWY_INLINE BiasOfTile load_bias_row(const BiasRows& rows, int64_t n, float* HWY_RESTRICT to) {
  const Square f;
  BiasCensus<Square> census;
  for (int64_t jj = 0; jj < n; jj += kSquare) {
    const char* const from = rows.at[0] + jj * rows.stride;
    const bool whole = jj + kSquare <= n && rows.dense(kDType);
    const auto x = census.hide(whole ? load_bias_keys<kDType>(from)
                                     : gather_bias_keys<kDType>(from, rows.stride, n - jj));
    census.add(x);
    hn::StoreU(x, f, to + jj);
  }
  return census.result();
}

/// Whether some row of a panel sees some key of a tile in spite of the bias. If so, the panel has
/// the bias of the tile: in memory `to` where `loads`, and otherwise there or where it lies,
/// whatever is faster to add.
template <DType kDType>
HWY_NOINLINE bool load_bias_of(const Task& task, const KeyTile& tile, bool loads, float* to,
                               Panel* panel) {
  const BiasRows rows(task.given.bias.data, task.problem.bias, *panel, tile.j);
  const int64_t width = panel->width();
  const bool dense = tile.n == kBc && rows.dense(kDType);
  bool lies = false;
  panel->bias_step = width;
  const BiasOfTile is = [&]() HWY_ATTR -> BiasOfTile {
    if (!loads && panel->shares_bias) {
      panel->bias_step = 0;
      return load_bias_row<kDType>(rows, tile.n, to);
    }
    if constexpr (kDType == DType::kBool) {
      if (dense) return load_bool_tile(rows, width, to);
    } else if (dense) {
      if (const auto uniform = uniform_tile<kDType>(rows, width)) return *uniform;
      if constexpr (kDType != DType::kF16) lies = !loads && hides_none<kDType>(rows, width);
      if (lies) return {.is_zero = false, .hides_some = false, .hides_all = false};
    }
    return load_bias_tile<kDType>(rows, tile.n, width, to);
  }();
  panel->bias_rows = lies ? task.given.bias.data : nullptr;
  panel->bias = is.is_zero || lies ? nullptr : to;
  // What says of a tile at once that it is hidden has loaded nothing.
  if (is.hides_all && panel->bias_step > 0) {
    std::fill_n(to, tile.n * width, -std::numeric_limits<float>::infinity());
  }
  panel->mask.hide(is.hides_some ? to : nullptr, tile.j, panel->bias_step);
  return !is.hides_all;
}

HWY_INLINE bool load_bias(const Task& task, const KeyTile& tile, bool loads, float* to,
                          Panel* panel) {
  switch (task.problem.bias.dtype) {
    case DType::kBool:
      return load_bias_of<DType::kBool>(task, tile, loads, to, panel);
    case DType::kF16:
      return load_bias_of<DType::kF16>(task, tile, loads, to, panel);
    case DType::kBF16:
      return load_bias_of<DType::kBF16>(task, tile, loads, to, panel);
    default:
      return load_bias_of<DType::kF32>(task, tile, loads, to, panel);
  }
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

/// S + factor bias, from where that lies.
template <DType kDType>
HWY_NOINLINE void add_numbers(const Problem& p, const Panel& panel, int64_t j, float factor,
                              float* HWY_RESTRICT S, int64_t ld) {
  const F32 f;
  const BiasRows rows(panel.bias_rows, p.bias, panel, j);
  const V32 by = hn::Set(f, factor);
  for_numbers<kDType>(rows, panel.vectors, [&](int64_t jj, int64_t v, V32 x) HWY_ATTR {
    float* const at = S + jj * ld + v * kLanes;
    hn::Store(hn::MulAdd(x, by, hn::Load(f, at)), f, at);
  });
}

/// S + factor bias, which has the derivative `factor`; -inf where the bias is, whatever S is.
/// `factor`: that of scores in the units of S.
HWY_INLINE void add_bias(const Problem& p, const Panel& panel, const KeyTile& tile, float factor,
                         float* HWY_RESTRICT S, int64_t ld) {
  if (panel.bias_rows != nullptr) {
    if (p.bias.dtype == DType::kBF16)
      return add_numbers<DType::kBF16>(p, panel, tile.j, factor, S, ld);
    return add_numbers<DType::kF32>(p, panel, tile.j, factor, S, ld);
  }
  if (panel.bias == nullptr) return;
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V32 by = hn::Set(f, factor);
  const auto add = [&](const auto& bias, const auto& sum) HWY_ATTR {
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      for (int64_t v = 0; v < panel.vectors; ++v) {
        float* at = S + jj * ld + v * kLanes;
        hn::Store(sum(hn::Load(f, at), bias(jj, v)), f, at);
      }
    }
  };
  const auto plain = [&](V32 x, V32 b) HWY_ATTR { return hn::MulAdd(b, by, x); };
  const auto hiding = [&](V32 x, V32 b) HWY_ATTR {
    return hn::IfThenElse(hn::Eq(b, none), b, hn::MulAdd(b, by, x));
  };
  const auto add_either = [&](const auto& bias) HWY_ATTR {
    panel.mask.hides() ? add(bias, hiding) : add(bias, plain);
  };
  if (panel.bias_step == 0) {
    add_either([&](int64_t jj, int64_t) HWY_ATTR { return hn::Set(f, panel.bias[jj]); });
  } else {
    add_either([&](int64_t jj, int64_t v) HWY_ATTR {
      return hn::Load(f, panel.bias + jj * panel.bias_step + v * kLanes);
    });
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
