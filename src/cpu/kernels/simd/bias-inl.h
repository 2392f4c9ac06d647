// A dense bias in the CPU's kernels: it is added to the scores of a row tile and a key tile, and
// hides the keys where it is -inf.
#if defined(FULGUR_CPU_BIAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_BIAS_INL_H_
#undef FULGUR_CPU_BIAS_INL_H_
#else
#define FULGUR_CPU_BIAS_INL_H_
#endif

#include <optional>
#include <type_traits>

#include "cpu/kernels/simd/row_tile-inl.h"
#include "kernels/host_device/score.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// Bytes of an element of a bias.
template <DType kDType>
constexpr int64_t kBiasBytes = kDType == DType::kF32    ? 4
                               : kDType == DType::kBool ? 1
                                                        : 2;

/// The bias of a vector of keys of a row as floats. Bools become 0 (true) and -inf (false).
template <DType kDType, class D = Square>
HWY_INLINE hn::Vec<D> load_bias_keys(const void* from) {
  const D f;
  if constexpr (kDType == DType::kBool) {
    const hn::RebindToSigned<D> i;
    const hn::Rebind<uint8_t, D> bytes;
    const auto seen = hn::PromoteTo(i, hn::LoadU(bytes, static_cast<const uint8_t*>(from)));
    const auto hidden = hn::RebindMask(f, hn::Eq(seen, hn::Zero(i)));
    return hn::IfThenElseZero(hidden, hn::Set(f, -std::numeric_limits<float>::infinity()));
  } else {
    return load_wide<kDType, D>(from);
  }
}

/// The bias of the first n keys of a row, whose elements are `stride` bytes apart. The lanes after
/// them repeat the last.
template <DType kDType>
HWY_INLINE hn::Vec<Square> gather_bias_keys(const char* from, int64_t stride, int64_t n) {
  constexpr int64_t kSize = kBiasBytes<kDType>;
  alignas(64) char keys[kSquare * kSize];
  for (int64_t i = 0; i < kSquare; ++i) {
    std::memcpy(keys + i * kSize, from + std::min(i, n - 1) * stride, kSize);
  }
  return load_bias_keys<kDType>(keys);
}

/// The addresses of the rows of a bias, one for each lane of a row tile, from key j on.
struct BiasRows {
  const char* from = nullptr;     // the address of key j of a row of offset 0
  const int64_t* rows = nullptr;  // the offset of each row, in elements
  int64_t stride = 0;             // bytes from a key to the next

  BiasRows() = default;
  BiasRows(const void* data, const Problem::Bias& layout, const RowTile& row_tile, int64_t j)
      : from(static_cast<const char*>(data) + j * layout.key * size_of(layout.dtype)),
        rows(row_tile.bias_row),
        stride(layout.key * size_of(layout.dtype)) {}
  /// Rows of floats in memory.
  BiasRows(const float* memory, const int64_t* rows)
      : from(reinterpret_cast<const char*>(memory)), rows(rows), stride(sizeof(float)) {}
  bool given() const { return from != nullptr; }
  template <DType kDType>
  const char* at(int64_t lane) const {
    return from + rows[lane] * kBiasBytes<kDType>;
  }
  /// Whether the keys of each row lie side by side.
  bool dense(DType dtype) const { return stride == size_of(dtype); }
};

/// Prefetches keys [j, j + n) of some rows of a bias, or of its gradient, in so many parts.
inline RowPrefetch bias_prefetch(const void* data, const Problem::Bias& at, const int64_t* rows,
                                 int64_t count, int64_t j, int64_t n, int64_t parts) {
  if (data == nullptr || at.key != 1 || n <= 0) return {};
  const int64_t size = size_of(at.dtype);
  return {static_cast<const char*>(data) + j * size,
          rows,
          size,
          n * size,
          count,
          (count + parts - 1) / parts};
}

/// Properties of the bias in a tile.
struct BiasOfTile {
  bool is_zero, hides_some, hides_all;
};

/// Finds these properties from all vectors of the bias.
template <class D>
class BiasCensus {
 public:
  // Not default member initializers, which are compiled for the baseline CPU.
  HWY_INLINE BiasCensus()
      : any_(hn::Zero(U())), every_(hn::Not(hn::Zero(U()))), largest_(hn::Zero(U())) {}
  /// x, with -inf for the numbers that hide a key.
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
    const auto hidden = hn::Set(u, 0xff800000);  // -inf; only the bits of NaN are larger
    const auto all = [&](auto mask) HWY_ATTR { return hn::AllTrue(u, mask); };
    return {.is_zero = all(hn::Eq(hn::Add(any_, any_), hn::Zero(u))),  // of either sign
            .hides_some = !all(hn::Lt(largest_, hidden)),
            .hides_all = all(hn::And(hn::Eq(every_, hidden), hn::Eq(largest_, hidden)))};
  }

 private:
  using U = hn::RebindToUnsigned<D>;
  hn::Vec<U> any_, every_, largest_;
};

/// Loads a square of words of 32 bits, of rows at at(r), and transposes it: x[i] has word i of each
/// row, one row in each lane. Each cache line is read completely before the next, because rows a
/// power of two apart evict each other from the L1 cache.
template <class At>
HWY_INLINE void load_words(const At& at, V32 (&x)[kLanes]) {
  const F32 f;
  const auto word = [&](int row, int i)
                        HWY_ATTR { return reinterpret_cast<const float*>(at(row)) + i; };
  // Rows whose words meet in the end already share vectors, in other blocks: these are loads.
#if HWY_TARGET == HWY_AVX3
  // Rows r and r + 4, eight words of each: the first of rows 0 to 3 and 8 to 11, then the others.
  FULGUR_UNROLL for (int i = 0; i < kLanes / 2; ++i) {
    const int row = i / 4 * 8 + i % 4;
    FULGUR_UNROLL for (int half = 0; half < 2; ++half) {
      const __m512 lower = _mm512_castps256_ps512(_mm256_loadu_ps(word(row, 8 * half)));
      x[i + half * kLanes / 2] =
          V32{_mm512_insertf32x8(lower, _mm256_loadu_ps(word(row + 4, 8 * half)), 1)};
    }
  }
#elif HWY_MAX_BYTES == 32
  const hn::Half<F32> part;
  FULGUR_UNROLL for (int i = 0; i < kLanes / 2; ++i) {
    FULGUR_UNROLL for (int half = 0; half < 2; ++half) {
      x[i + half * kLanes / 2] = hn::Combine(f, hn::LoadU(part, word(i + 4, 4 * half)),
                                             hn::LoadU(part, word(i, 4 * half)));
    }
  }
#else
  FULGUR_UNROLL for (int i = 0; i < kLanes; ++i) x[i] = hn::LoadU(f, word(i, 0));
#endif
  transpose_blocks(f, x);
#if HWY_TARGET == HWY_AVX3
  // Blocks of x[8 h + i]: words 8 h + i and 8 h + i + 4 of rows 0 to 3, then of rows 4 to 7;
  // x[8 h + i + 4] likewise of rows 8 to 15.
  FULGUR_UNROLL for (int i = 0; i < kLanes; i += 8) {
    FULGUR_UNROLL for (int k = i; k < i + 4; ++k) {
      const __m512 first = x[k].raw, second = x[k + 4].raw;
      x[k] = V32{_mm512_shuffle_f32x4(first, second, 0x88)};
      x[k + 4] = V32{_mm512_shuffle_f32x4(first, second, 0xdd)};
    }
  }
#endif
}

/// Whether the bias of a dtype is loaded in words of 32 bits.
template <DType kDType>
constexpr bool kByWords = kDType != DType::kF16 || kHardwareF16;

/// The numbers in words of 32 bits: number i of each word of a vector. Bools become 0 (true) and
/// -inf (false).
template <DType kDType>
constexpr int64_t kPerWord = 4 / kBiasBytes<kDType>;
template <DType kDType>
HWY_INLINE V32 number_of(V32 words, int i) {
  const F32 f;
  const U32 u;
  const auto bits = hn::BitCast(u, words);
  if constexpr (kDType == DType::kF32) {
    return words;
  } else if constexpr (kDType == DType::kBF16) {
    return hn::BitCast(f, i == 0 ? hn::ShiftLeft<16>(bits) : hn::And(bits, hn::Set(u, 0xffff0000)));
  } else if constexpr (kDType == DType::kF16) {
    const auto half = hn::TruncateTo(U16(), i == 0 ? bits : hn::ShiftRight<16>(bits));
    return hn::PromoteTo(f, hn::BitCast(F16(), half));
  } else {
    const auto hidden = hn::Eq(hn::And(bits, hn::Set(u, 0xffu << 8 * i)), hn::Zero(u));
    return hn::IfThenElseZero(hn::RebindMask(f, hidden),
                              hn::Set(f, -std::numeric_limits<float>::infinity()));
  }
}

/// The keys that a line of kLanes words has of the rows of vector v of a row tile, from key jj of a
/// whole tile on. The rows are dense.
template <DType kDType>
constexpr int64_t kLineKeys = kLanes* kPerWord<kDType>;
template <DType kDType>
HWY_INLINE void load_line(const BiasRows& rows, int64_t v, int64_t jj, V32 (&words)[kLanes]) {
  const int64_t first = v * kLanes, byte = jj * kBiasBytes<kDType>;
  load_words([&](int row) HWY_ATTR { return rows.at<kDType>(first + row) + byte; }, words);
}

/// Calls body(jj, v, x) for each key jj of a whole tile and each vector v of a row tile, where x is
/// their bias, with one row in each lane.
template <DType kDType, class Body>
HWY_INLINE void for_numbers(const BiasRows& rows, int64_t vectors, const Body& body) {
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t jj = 0; jj < kBc; jj += kLineKeys<kDType>) {
      V32 words[kLanes];
      load_line<kDType>(rows, v, jj, words);
      FULGUR_UNROLL for (int i = 0; i < kLanes; ++i) {
        FULGUR_UNROLL for (int k = 0; k < kPerWord<kDType>; ++k) {
          body(jj + i * kPerWord<kDType> + k, v, number_of<kDType>(words[i], k));
        }
      }
    }
  }
}

/// Loads the bias of the rows of a row tile and of n keys to [n][width], one row in each lane, with
/// -inf where it hides a key.
template <DType kDType>
HWY_INLINE BiasOfTile load_bias_tile(const BiasRows& rows, int64_t n, int64_t width,
                                     float* HWY_RESTRICT to) {
  constexpr bool kMayBeFinite = kDType == DType::kF32 || kDType == DType::kBF16;
  if constexpr (kByWords<kDType>) {
    if (n == kBc && rows.dense(kDType)) {
      BiasCensus<F32> census;
      for_numbers<kDType>(rows, width / kLanes, [&](int64_t jj, int64_t v, V32 x) HWY_ATTR {
        if constexpr (kMayBeFinite) x = census.hide(x);
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
      x[i] = keys(rows.at<kDType>(lane + i) + jj * rows.stride);
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

/// The bits of an element of a bias.
template <DType kDType>
using BiasBits = std::conditional_t<kDType == DType::kF32, uint32_t,
                                    std::conditional_t<kDType == DType::kBool, uint8_t, uint16_t>>;

/// The properties of a tile whose elements are all the same, 0 or a number that hides, as in most
/// tiles of a mask; nothing for other tiles. Stops at the first different element.
template <DType kDType>
HWY_INLINE std::optional<BiasOfTile> uniform_tile(const BiasRows& rows, int64_t width) {
  using Bits = BiasBits<kDType>;
  constexpr bool kBools = kDType == DType::kBool;
  const hn::CappedTag<Bits, kBc> b;
  Bits first;
  std::memcpy(&first, rows.at<kDType>(0), sizeof first);
  const bool hides = kBools ? first == 0 : load_element(&first, kDType, 0) < kernels::kHidingBias;
  if (!kBools && !hides && first != 0) return {};
  const auto one = hn::Set(b, first);
  const auto is_same = [&](auto x) HWY_ATTR {
    if (kBools && !hides) return hn::Ne(x, hn::Zero(b));  // every bool that is true
    return hn::Eq(x, one);
  };
  for (int64_t lane = 0; lane < width; ++lane) {
    const auto* const keys = reinterpret_cast<const Bits*>(rows.at<kDType>(lane));
    auto same = is_same(hn::LoadU(b, keys));
    for (size_t jj = hn::Lanes(b); jj < kBc; jj += hn::Lanes(b)) {
      same = hn::And(same, is_same(hn::LoadU(b, keys + jj)));
    }
    if (!hn::AllTrue(b, same)) return {};
  }
  return BiasOfTile{!hides, hides, hides};
}

/// Loads the bias of n keys and of the first `count` rows of a row tile to [count][kBc], with -inf
/// where it hides a key.
template <DType kDType>
HWY_INLINE BiasOfTile load_bias_rows(const BiasRows& rows, int64_t count, int64_t n,
                                     float* HWY_RESTRICT to) {
  const Square f;
  BiasCensus<Square> census;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t jj = 0; jj < n; jj += kSquare) {
      const char* const from = rows.at<kDType>(r) + jj * rows.stride;
      const bool whole = jj + kSquare <= n && rows.dense(kDType);
      const auto x = census.hide(whole ? load_bias_keys<kDType>(from)
                                       : gather_bias_keys<kDType>(from, rows.stride, n - jj));
      census.add(x);
      hn::StoreU(x, f, to + r * kBc + jj);
    }
  }
  return census.result();
}

/// Sets the bias of a key tile in a row tile: in the memory `to` if `loads`, or else there or in
/// the tensor. Returns false if it finds that the bias hides all keys from all rows. A bias that
/// stays in the tensor is not searched for that unless all its elements are the same.
template <DType kDType>
HWY_NOINLINE bool load_bias_of(const Task& task, const KeyTile& tile, bool loads, float* to,
                               RowTile* row_tile) {
  const BiasRows rows(task.given.bias.data, task.problem.bias, *row_tile, tile.j);
  const int64_t width = row_tile->width();
  const bool dense = tile.n == kBc && rows.dense(kDType);
  bool in_tensor = false;
  row_tile->bias_step = width;
  row_tile->bias_memory = to;
  const BiasOfTile is = [&]() HWY_ATTR -> BiasOfTile {
    if (!loads && row_tile->shares_bias) {
      row_tile->bias_step = 0;
      return load_bias_rows<kDType>(rows, 1, tile.n, to);
    }
    if (dense) {
      if (const auto uniform = uniform_tile<kDType>(rows, width)) return *uniform;
      in_tensor = kByWords<kDType> && !loads;
      if (in_tensor) return {.is_zero = false, .hides_some = false, .hides_all = false};
    }
    return load_bias_tile<kDType>(rows, tile.n, width, to);
  }();
  row_tile->bias_rows = in_tensor ? task.given.bias.data : nullptr;
  row_tile->bias = is.is_zero || in_tensor ? nullptr : to;
  // uniform_tile() has not loaded the tile.
  if (is.hides_all && row_tile->bias_step > 0) {
    std::fill_n(to, tile.n * width, -std::numeric_limits<float>::infinity());
  }
  row_tile->mask.hide(is.hides_some ? to : nullptr, tile.j, row_tile->bias_step);
  return !is.hides_all;
}

/// Calls body(dtype) with the dtype of a bias as a constant.
template <class Body>
HWY_INLINE auto with_bias_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBool:
      return body(std::integral_constant<DType, DType::kBool>());
    case DType::kF16:
      return body(std::integral_constant<DType, DType::kF16>());
    case DType::kBF16:
      return body(std::integral_constant<DType, DType::kBF16>());
    default:
      return body(std::integral_constant<DType, DType::kF32>());
  }
}

HWY_INLINE bool load_bias(const Task& task, const KeyTile& tile, bool loads, float* to,
                          RowTile* row_tile) {
  return with_bias_dtype(task.problem.bias.dtype, [&](auto dtype) {
    return load_bias_of<decltype(dtype)::value>(task, tile, loads, to, row_tile);
  });
}

/// Loads the bias of a whole tile from dense rows to [kBc][width], numbers that hide included.
template <DType kDType>
HWY_NOINLINE void load_numbers_of(const BiasRows& rows, int64_t vectors, float* HWY_RESTRICT to) {
  if constexpr (kByWords<kDType>) {
    for_numbers<kDType>(rows, vectors, [&](int64_t jj, int64_t v, V32 x) HWY_ATTR {
      hn::Store(x, F32(), to + (jj * vectors + v) * kLanes);
    });
  }
}
HWY_INLINE void load_numbers(DType dtype, const BiasRows& rows, int64_t vectors, float* to) {
  with_bias_dtype(
      dtype, [&](auto constant) { load_numbers_of<decltype(constant)::value>(rows, vectors, to); });
}

/// Adds the first n keys of dS, the gradient of the scores of a row, to dbias from element `at` on.
/// Elements of 16 bits have only one summand, and -0 becomes 0 as in a sum.
template <DType kDType>
HWY_INLINE void add_bias_keys(const BiasSums& sums, int64_t at, int64_t n, V32 dS) {
  const F32 f;
  const int64_t stride = sums.at.key;
  if (stride == 1 && n >= kLanes) {
    char* const to = static_cast<char*>(sums.data) + at * kBiasBytes<kDType>;
    dS = hn::Add(kDType == DType::kF32 ? load_wide<kDType>(to) : hn::Zero(f), dS);
    return store_narrow<kDType>(dS, to);
  }
  HWY_ALIGN float keys[kLanes];
  hn::Store(dS, f, keys);
  for (int64_t jj = 0; jj < std::min(n, kLanes); ++jj) {
    if constexpr (kDType == DType::kF32) {
      static_cast<float*>(sums.data)[at + jj * stride] += keys[jj];
    } else {
      store_element(sums.data, kDType, at + jj * stride, 0.0f + keys[jj]);
    }
  }
}

/// Adds dS [n][width] of a tile to dbias.
template <DType kDType>
HWY_NOINLINE void add_bias_gradient_of(const BiasSums& sums, const RowTile& row_tile,
                                       const KeyTile& tile, const float* HWY_RESTRICT dS) {
  const int64_t width = row_tile.width();
  for (int64_t lane = 0; lane < row_tile.count; lane += kLanes) {
    for (int64_t jj = 0; jj < tile.n; jj += kLanes) {
      V32 rows[kLanes];  // whose lanes are keys
      load_words(
          [&](int key)
              HWY_ATTR { return reinterpret_cast<const char*>(dS + (jj + key) * width + lane); },
          rows);
      FULGUR_UNROLL for (int i = 0; i < kLanes; ++i) {
        if (lane + i >= row_tile.count) continue;
        const int64_t at = row_tile.dbias_row[lane + i] + (tile.j + jj) * sums.at.key;
        add_bias_keys<kDType>(sums, at, tile.n - jj, rows[i]);
      }
    }
  }
}
HWY_INLINE void add_bias_gradient(const BiasSums& sums, const RowTile& row_tile,
                                  const KeyTile& tile, const float* dS) {
  switch (sums.at.dtype) {
    case DType::kF16:
      return add_bias_gradient_of<DType::kF16>(sums, row_tile, tile, dS);
    case DType::kBF16:
      return add_bias_gradient_of<DType::kBF16>(sums, row_tile, tile, dS);
    default:
      return add_bias_gradient_of<DType::kF32>(sums, row_tile, tile, dS);
  }
}

/// S += factor bias, from the tensor, and -inf where the bias hides a key; returns whether it hides
/// some.
template <DType kDType>
HWY_INLINE bool add_numbers(const BiasRows& rows, int64_t vectors, float factor,
                            float* HWY_RESTRICT S, int64_t ld) {
  const F32 f;
  const V32 by = hn::Set(f, factor), none = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V32 hiding = hn::Set(f, static_cast<float>(kernels::kHidingBias));
  auto any = hn::Lt(by, by);
  for_numbers<kDType>(rows, vectors, [&](int64_t jj, int64_t v, V32 x) HWY_ATTR {
    float* const at = S + jj * ld + v * kLanes;
    const auto hides = hn::Lt(x, hiding);
    hn::Store(hn::IfThenElse(hides, none, hn::MulAdd(x, by, hn::Load(f, at))), f, at);
    any = hn::Or(any, hides);
  });
  return !hn::AllFalse(f, any);
}

/// S += factor bias for a row tile whose bias lies in the tensor. If some key is hidden, loads the
/// bias to the row tile's memory, if it has some, for the mask.
template <DType kDType>
HWY_NOINLINE void add_bias_rows(const Problem& p, const KeyTile& tile, float factor,
                                float* HWY_RESTRICT S, int64_t ld, RowTile* row_tile) {
  const BiasRows rows(row_tile->bias_rows, p.bias, *row_tile, tile.j);
  const bool hides = add_numbers<kDType>(rows, row_tile->vectors, factor, S, ld);
  float* const bias = row_tile->bias_memory;
  if (!hides || bias == nullptr) return;
  const int64_t width = row_tile->width();
  load_bias_tile<kDType>(rows, kBc, width, bias);
  row_tile->bias_rows = nullptr;
  row_tile->bias = bias;
  row_tile->mask.hide(bias, tile.j, width);
}

/// S += factor bias, and -inf where the bias is -inf, whatever S is. `factor` converts the bias to
/// the units of S.
HWY_INLINE void add_bias(const Problem& p, const KeyTile& tile, float factor, float* HWY_RESTRICT S,
                         int64_t ld, RowTile* to) {
  if (to->bias_rows != nullptr) {
    return with_bias_dtype(p.bias.dtype, [&](auto dtype) {
      constexpr DType kDType = decltype(dtype)::value;
      if constexpr (kByWords<kDType>) add_bias_rows<kDType>(p, tile, factor, S, ld, to);
    });
  }
  const RowTile& row_tile = *to;
  if (row_tile.bias == nullptr) return;
  const F32 f;
  const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
  const V32 by = hn::Set(f, factor);
  const auto add = [&](const auto& bias, const auto& sum) HWY_ATTR {
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      for (int64_t v = 0; v < row_tile.vectors; ++v) {
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
    row_tile.mask.hides() ? add(bias, hiding) : add(bias, plain);
  };
  if (row_tile.bias_step == 0) {
    add_either([&](int64_t jj, int64_t) HWY_ATTR { return hn::Set(f, row_tile.bias[jj]); });
  } else {
    add_either([&](int64_t jj, int64_t v) HWY_ATTR {
      return hn::Load(f, row_tile.bias + jj * row_tile.bias_step + v * kLanes);
    });
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
