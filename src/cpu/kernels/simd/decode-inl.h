// FlashAttention-3's split-KV for few query rows: a task computes an unnormalized state over a part
// of the keys, and the states are merged to O and LSE. K and V are read once from memory and
// widened in registers: lanes run along the head dim, where memory is contiguous. Where the heads
// of a key are contiguous, a task computes all of them, so that memory is read in order.
#if defined(FULGUR_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_DECODE_INL_H_
#undef FULGUR_CPU_DECODE_INL_H_
#else
#define FULGUR_CPU_DECODE_INL_H_
#endif

#include "cpu/kernels/simd/decode_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The maximum rows a kv head that are decoded. More rows fill the vectors of row tiles well.
constexpr int64_t kDecodeRows = std::min<int64_t>(16, kBr);

/// The locality of prefetches, to the L2 cache: it can have more reads in flight than the L1 cache.
constexpr int kToL2 = 2;

/// The streams of keys that are read in turns, each over its own run of the tile's keys in the
/// order of memory. The hardware prefetcher follows such streams, and a single one has too few
/// reads in flight.
constexpr int kStreams = kRegisters == 32 ? 4 : 2;

/// Calls body(streams, j, step) for all n keys of a tile: kEach keys from each of j, j + step, ...
/// on, of which there are decltype(streams)::value; at the end maybe fewer than kEach.
template <int kEach, class Body>
HWY_INLINE void for_streams(int64_t n, const Body& body) {
  const int64_t run = n / (kStreams * kEach) * kEach;
  for (int64_t j = 0; j < run; j += kEach) body(std::integral_constant<int, kStreams>(), j, run);
  for (int64_t j = run * kStreams; j < n; j += kEach) body(std::integral_constant<int, 1>(), j, 0);
}

/// A tile of n keys of K or V, with the rows of all heads of the task. The next tile ends at most
/// at key `end`.
struct DecodeTile {
  const char *at[kBc],
      *soon[kBc];  // the rows of the first head, and those that their streams reach later
  int64_t head;    // bytes from a row to that of the next head
  int64_t bytes;   // bytes of a row

  DecodeTile(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim, int64_t j,
             int64_t n, int64_t end)
      : head(bytes_of(t.dtype, layout.head)), bytes(bytes_of(t.dtype, dim)) {
    key_addresses(task, t, layout, j, n, at);
    std::copy_n(at, n, soon);
    const int64_t run = n / kStreams, next = std::min(kBc, end - j - n) / kStreams;
    const int64_t ahead = std::min(run, keys_ahead(task, t.dtype, layout));
    for (int64_t s = 0; s < kStreams; ++s) {
      const char** const to = std::copy_n(at + s * run + ahead, run - ahead, soon + s * run);
      key_addresses(task, t, layout, j + n + s * next, std::min(ahead, next), to);
    }
  }

  /// The row of key j and head i; prefetches a later row.
  HWY_INLINE const char* row(int64_t j, int64_t i) const {
    prefetch_row(soon[j] + i * head);
    return at[j] + i * head;
  }
  /// Prefetches the row of key j and head i.
  HWY_INLINE void prefetch(int64_t j, int64_t i) const { prefetch_row(at[j] + i * head); }

 private:
  static constexpr int64_t kAhead = 4096;  // bytes between a row and the one that is prefetched

  HWY_INLINE void prefetch_row(const char* row) const {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, kToL2);
  }

  static int64_t keys_ahead(const Task& task, DType dtype, const Layout& layout) {
    const int64_t stride = bytes_of(dtype, std::abs(key_stride(task.problem, layout)));
    return (kAhead + stride - 1) / std::max<int64_t>(1, stride);
  }
};

/// The rows of a task, one in each lane: their state over the tiles so far, and their scores of the
/// current tile.
struct DecodeRows {
  int64_t count, width;            // rows; lanes, a whole number of vectors
  std::vector<RowTile> row_tiles;  // of kBr lanes each
  std::vector<float*> bias;        // of each row tile: [kBc][width]
  float* O;                        // [width][round_up(dv)]
  float *m, *l, *alpha;            // [width]
  float* S;                        // [kBc][width]

  DecodeRows(const Problem& p, int64_t rows, Arena& arena)
      : count(rows), width(round_up(rows, kLanes)) {
    O = arena.take(width * round_up(p.dv, kLanes));
    m = arena.take(width);
    l = arena.take(width);
    alpha = arena.take(width);
    S = arena.take(kBc * width + kLanes);  // a vector may begin at any row
    bias.resize(p.has(Arg::kBias) ? (rows + kBr - 1) / kBr : 0);
    for (float*& tile : bias) tile = take_bias_tile(p, arena);
  }

  /// The rows of one kv head follow those of the kv head before.
  void start(const Task& task) {
    row_tiles.resize((count + kBr - 1) / kBr);
    for (int64_t row = 0; row < count; row += kBr) {
      make_row_tile(task, row, std::min(count, row + kBr), &row_tiles[row / kBr]);
    }
    std::fill_n(O, width * round_up(task.problem.dv, kLanes), 0.0f);
    std::fill_n(m, width, -std::numeric_limits<float>::infinity());
    std::fill_n(l, width, 0.0f);
    std::fill_n(S, kBc * width + kLanes, 0.0f);
  }

  /// Loads the bias of a tile, if the call has one; returns false if it hides all keys.
  bool take_bias(const Task& task, const KeyTile& tile) {
    bool sees = bias.empty();
    for (size_t i = 0; i < bias.size(); ++i) {
      sees |= load_bias(task, tile, false, bias[i], &row_tiles[i]);
    }
    return sees;
  }

  /// Turns S of a tile into P.
  HWY_INLINE void probabilities(const Task& task, const KeyTile& tile) {
    const Problem& p = task.problem;
    for (size_t i = 0; i < row_tiles.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) * kBr;
      score_rule(p, tile, S + at, width, nullptr, &row_tiles[i]);
      online_softmax(row_tiles[i], tile.n, S + at, width, m + at, l + at, alpha + at);
      if (p.dropout_p == 0) continue;
      const auto keep_scale = static_cast<float>(1 / (1 - p.dropout_p));
      drop(task.given.dropout, keep_scale, row_tiles[i], tile, width, S + at, nullptr);
    }
  }

  /// Whether some row does not see some key of a tile.
  bool hide(const KeyTile& tile) const {
    return std::any_of(row_tiles.begin(), row_tiles.end(),
                       [&](const RowTile& row_tile) { return row_tile.mask.hides(tile); });
  }

  /// Writes the states; returns the address after them.
  float* finish(int64_t dv, float* states) const {
    for (int64_t r = 0; r < count; ++r, states += dv + 2) {
      std::copy_n(O + r * round_up(dv, kLanes), dv, states);
      states[dv] = m[r];
      states[dv + 1] = l[r];
    }
    return states;
  }
};

/// Heads [begin, end) of a task, of `rows` rows each, and the scores or weights of their keys.
struct DecodeHeads {
  int64_t begin, end, rows;
  float* S;  // [n][width] of DecodeRows
};

/// O += P^T V with n keys.
template <DType kDType, class Tile>
HWY_NOINLINE void add_values(Widened<kDType>, const Tile& V, int64_t n, int64_t dv,
                             const DecodeHeads& heads, const DecodeRows& all) {
  const int64_t ldo = round_up(dv, kLanes), rows = heads.rows;
  for_streams<1>(n, [&](auto streams, int64_t j, int64_t step) HWY_ATTR {
    constexpr int kCount = decltype(streams)::value;
    for (int64_t i = heads.begin, r = i * rows; i < heads.end; ++i, r += rows) {
      const char* row[kCount];
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) row[k] = V.row(j + k * step, i);
      add_rows<kDType, kCount>(row, dv, heads.S + j * all.width + r, step * all.width,
                               all.O + r * ldo, ldo, rows);
    }
  });
}

/// S = factor K Q^T of n keys.
template <class Products, class Tile>
HWY_NOINLINE void dot_keys(const Tile& K, int64_t n, int64_t d,
                           const typename Products::Element* HWY_RESTRICT Q, float factor,
                           const DecodeHeads& heads, const DecodeRows& all) {
  const int64_t ldq = round_up(d, Products::kElements), rows = heads.rows;
  for_streams<1>(n, [&](auto streams, int64_t j, int64_t step) HWY_ATTR {
    constexpr int kCount = decltype(streams)::value;
    for (int64_t i = heads.begin, r = i * rows; i < heads.end; ++i, r += rows) {
      const char* row[kCount];
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) row[k] = K.row(j + k * step, i);
      dot_rows<Products, kCount>(row, d, Q + r * ldq, ldq, factor, rows,
                                 heads.S + j * all.width + r, step * all.width);
    }
  });
}

/// O += P^T V of heads [begin, end) where some row does not see some key: a masked key must not
/// touch the row, as 0 * NaN would.
HWY_NOINLINE inline void add_visible_values(const Task& first, const ForwardArgs& args,
                                            const KeyTile& tile, const DecodeRows& all,
                                            int64_t begin, int64_t end) {
  const F32 f;
  const Problem& p = first.problem;
  const int64_t ldo = round_up(p.dv, kLanes), rows = first.rows();
  HWY_ALIGN float value[512 + kLanes];
  for (int64_t jj = 0; jj < tile.n; ++jj) {
    for (int64_t r = begin * rows; r < end * rows; ++r) {
      if (r % rows == 0) {
        load_keys(first.kv_head_after(r / rows), args.v, p.v, p.dv, tile.j + jj, 1, value, ldo,
                  first.given.scaling.v);
      }
      if (!all.row_tiles[r / kBr].mask.sees(r % kBr, tile.j + jj)) continue;
      const V32 weight = hn::Set(f, all.S[jj * all.width + r]);
      for (int64_t c = 0; c < ldo; c += kLanes) {
        float* o = all.O + r * ldo + c;
        hn::Store(hn::MulAdd(weight, hn::Load(f, value + c), hn::Load(f, o)), f, o);
      }
    }
  }
}

/// The keys of a head of K or V whose codes become numbers in memory at a time: few enough to stay
/// in the L1 cache together with the rows.
constexpr int64_t kMadeKeys = 16;

/// K or V of a task, with its scales and zero points.
struct DecodeOperand {
  const ConstTensor& t;
  const Layout& layout;
  int64_t dim;
  const Scaling& scaling;
  float* numbers;  // [kMadeKeys][round_up(dim)]

  /// Whether codes become numbers in memory, instead of in registers: those of rarely used formats,
  /// with zero points, or with several scales in a row.
  bool made() const {
    constexpr DType kInRegisters[] = {DType::kE4M3, DType::kInt8, DType::kQ8_0, DType::kQ4_0};
    if (!is_low_bit(t.dtype)) return false;
    return std::ranges::find(kInRegisters, t.dtype) == std::end(kInRegisters) ||
           scaling.zero_point.given() || (scaling.given() && scaling.scale.at.groups > 1);
  }
};

/// Memory for the numbers of kMadeKeys keys of K or V.
inline float* take_numbers(const Problem& p, Arena& arena) {
  const bool codes = is_low_bit(p.dtypes.k) || is_low_bit(p.dtypes.v);
  return codes ? arena.take(kMadeKeys * round_up(std::max(p.d, p.dv), kLanes)) : nullptr;
}

/// Rows in memory of the task.
struct MadeTile {
  const float* rows;
  int64_t ld;
  HWY_INLINE const char* row(int64_t j, int64_t) const {
    return reinterpret_cast<const char*>(rows + j * ld);
  }
};

/// Calls compute(Widened of the dtype, tile of keys, how many, heads) until all keys [j, j + n) of
/// all heads of a task are computed.
template <class Compute>
HWY_INLINE void with_numbers(const Task& first, const DecodeOperand& of, int64_t heads, int64_t j,
                             int64_t n, int64_t key_end, const DecodeRows& all,
                             const Compute& compute) {
  const int64_t rows = first.rows();
  const DecodeTile tile(first, of.t, of.layout, of.dim, j, n, key_end);
  if (of.made()) {
    const int64_t ld = round_up(of.dim, kLanes);
    for (int64_t at = 0; at < n; at += kMadeKeys) {
      const int64_t count = std::min(kMadeKeys, n - at);
      for (int64_t i = 0; i < heads; ++i) {
        for (int64_t key = at; key < at + count; ++key) tile.prefetch(key, i);
        load_keys(first.kv_head_after(i), of.t, of.layout, of.dim, j + at, count, of.numbers, ld,
                  of.scaling);
        compute(Widened<DType::kF32>(), MadeTile{of.numbers, ld}, count,
                DecodeHeads{i, i + 1, rows, all.S + at * all.width});
      }
    }
    return;
  }
  const DecodeHeads every{0, heads, rows, all.S};
  switch (of.t.dtype) {
    case DType::kF16:
      return compute(Widened<DType::kF16>(), tile, n, every);
    case DType::kBF16:
      return compute(Widened<DType::kBF16>(), tile, n, every);
    case DType::kE4M3:
      return compute(Widened<DType::kE4M3>(), tile, n, every);
    case DType::kInt8:
      return compute(Widened<DType::kInt8>(), tile, n, every);
    case DType::kQ8_0:
      return compute(Widened<DType::kQ8_0>(), tile, n, every);
    case DType::kQ4_0:
      return compute(Widened<DType::kQ4_0>(), tile, n, every);
    default:
      return compute(Widened<DType::kF32>(), tile, n, every);
  }
}

/// `rows` numbers of each of `count` keys, `ld` apart, times the scale of the key; scales are
/// `step` apart.
template <class Scale>
HWY_INLINE void descale_keys(const Scale* HWY_RESTRICT scale, int64_t step, int64_t count,
                             int64_t rows, float* HWY_RESTRICT to, int64_t ld) {
  const auto value = [](Scale x) {
    if constexpr (std::is_same_v<Scale, float>)
      return x;
    else
      return f32_from_f16(x);
  };
  if (rows == 1) {
    for (int64_t i = 0; i < count; ++i, scale += step, to += ld) *to *= value(*scale);
    return;
  }
  for (int64_t i = 0; i < count; ++i, scale += step, to += ld) {
    const float factor = value(*scale);
    for (int64_t row = 0; row < rows; ++row) to[row] *= factor;
  }
}

/// Multiplies S or P of a tile by the scales of the keys, whose codes are multiplied without them.
HWY_NOINLINE inline void descale_scores(const Task& first, const DecodeOperand& of, int64_t j,
                                        int64_t n, const DecodeRows& all) {
  if (!of.scaling.given() || of.made()) return;
  const ScaleTensor& scale = of.scaling.scale;
  const int64_t rows = first.rows(), step = scale.at.of_rows ? scale.at.row : 0;
  float* S = all.S;
  for (KvRuns run(first.keys, j, n); !run.done(); run.next()) {
    for (int64_t r = 0; r < all.count; r += rows) {
      const int64_t kv = first.kv + r / rows;
      const int64_t at = scale.at.offset(first.b, kv, run.entry, run.row, kv, 0);
      float* const to = S + r;
      if (scale.at.dtype == DType::kF32) {
        descale_keys(static_cast<const float*>(scale.data) + at, step, run.count, rows, to,
                     all.width);
      } else {
        descale_keys(static_cast<const uint16_t*>(scale.data) + at, step, run.count, rows, to,
                     all.width);
      }
    }
    S += run.count * all.width;
  }
}

/// Products of elements of any dtype, widened to f32.
struct Numbers : Widened<DType::kF32> {
  static HWY_INLINE void dot(const Task& first, const DecodeOperand& K, int64_t heads,
                             const KeyTile& tile, int64_t key_end, const float* HWY_RESTRICT Q,
                             float factor, const DecodeRows& all) {
    const auto by =
        [&](auto products, const auto& keys, int64_t n, const DecodeHeads& some)
            HWY_ATTR { dot_keys<decltype(products)>(keys, n, K.dim, Q, factor, some, all); };
    with_numbers(first, K, heads, tile.j, tile.n, key_end, all, by);
    descale_scores(first, K, tile.j, tile.n, all);
  }
  static HWY_INLINE void add_values(const Task& first, const DecodeOperand& V, int64_t heads,
                                    const KeyTile& tile, int64_t key_end, const DecodeRows& all) {
    descale_scores(first, V, tile.j, tile.n, all);
    const auto by =
        [&](auto products, const auto& values, int64_t n, const DecodeHeads& some)
            HWY_ATTR { HWY_NAMESPACE::add_values(products, values, n, V.dim, some, all); };
    with_numbers(first, V, heads, tile.j, tile.n, key_end, all, by);
  }
};

template <class Products>
HWY_INLINE void decode_by(const Task& first, const ForwardArgs& args, int64_t heads,
                          int64_t key_begin, int64_t key_end, float* states, float* scratch) {
  using Element = typename Products::Element;
  const Problem& p = first.problem;
  const int64_t rows = first.rows(), ldq = round_up(p.d, Products::kElements);
  Arena arena(scratch);
  DecodeRows all(p, heads * rows, arena);
  all.start(first);
  auto* const Q = reinterpret_cast<Element*>(arena.take(all.count * round_up(p.d, kLanes)));
  const float factor = Products::load(first, args, all.count, Q, ldq);
  float* const numbers = take_numbers(p, arena);
  const DecodeOperand K{args.k, p.k, p.d, first.given.scaling.k, numbers};
  const DecodeOperand V{args.v, p.v, p.dv, first.given.scaling.v, numbers};

  KeyTiles tiles = all.row_tiles[0].mask.tiles({key_begin, key_end});  // the same for every head
  for (; !tiles.done(); tiles.next()) {
    const KeyTile tile = tiles.tile();
    if (!all.take_bias(first, tile)) continue;
    Products::dot(first, K, heads, tile, key_end, Q, factor, all);
    all.probabilities(first, tile);
    scale_rows(all.alpha, all.O, round_up(p.dv, kLanes), all.count);
    if (all.hide(tile)) {
      add_visible_values(first, args, tile, all, 0, heads);
    } else {
      Products::add_values(first, V, heads, tile, key_end, all);
    }
  }
  all.finish(p.dv, states);
}

inline int64_t decode_scratch(const Problem& p, int64_t heads, int64_t rows) {
  Arena arena(nullptr);
  DecodeRows(p, heads * rows, arena);
  arena.take(heads * rows * round_up(p.d, kLanes));  // Q
  take_numbers(p, arena);
  return arena.used();
}

inline void decode(const Task& first, const ForwardArgs& args, int64_t heads, int64_t key_begin,
                   int64_t key_end, float* states, float* scratch) {
  decode_by<Numbers>(first, args, heads, key_begin, key_end, states, scratch);
}

/// m = max m_i, l = sum 2^(m_i - m) l_i, O = sum 2^(m_i - m) O_i / l; then the sink joins.
inline void decode_merge(const Task& task, const ForwardArgs& args, const float* states,
                         int64_t splits, int64_t split_stride) {
  const Problem& p = task.problem;
  HWY_ALIGN float o[512 + kLanes];
  for (int64_t r = 0; r < task.rows(); ++r) {
    const auto state = [&](int64_t i) { return states + i * split_stride + r * (p.dv + 2); };
    float m = -std::numeric_limits<float>::infinity(), l = 0;
    for (int64_t i = 0; i < splits; ++i) m = std::fmax(m, state(i)[p.dv]);
    std::fill(o, o + round_up(p.dv, kLanes), 0.0f);
    for (int64_t i = 0; i < splits; ++i) {
      const float* part = state(i);
      if (part[p.dv + 1] == 0) continue;  // the row saw no key of this part
      const float weight = std::exp2(part[p.dv] - m);
      l += weight * part[p.dv + 1];
      for (int64_t c = 0; c < p.dv; ++c) o[c] += weight * part[c];
    }
    const RowEnd end = end_row(task, r, m, l);
    for (int64_t c = 0; c < p.dv; ++c) o[c] = l == 0 ? 0 : end.weight * o[c] / l;
    store_row(args.out.dtype, o, p.dv, address(args.out, row_offset(task, p.out, r)));
    if (!p.has(Arg::kLse)) continue;
    static_cast<float*>(args.lse.data)[row_offset(task, p.lse, r)] = end.lse;
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
