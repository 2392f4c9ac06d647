// FlashAttention-3's split-KV for few query rows: a task takes a part of the keys and leaves an
// unnormalized state; merging the states gives O and LSE. K and V are read once from memory and
// widened in registers: lanes run along the head dim, where the memory is contiguous. Where the
// heads of a key lie side by side, a task takes all of them, so that memory is read in its order.
#if defined(FULGUR_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_DECODE_INL_H_
#undef FULGUR_CPU_DECODE_INL_H_
#else
#define FULGUR_CPU_DECODE_INL_H_
#endif

#include <hwy/cache_control.h>

#include "cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// Rows whose dot products share a load of K, and whose O shares a load of V.
constexpr int64_t kDecodeRows = 4;

/// Sums the 128-bit blocks of a vector.
template <class D>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> fold_blocks(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return fold_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

/// The four sums over all lanes of four vectors.
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> sum_lanes(V32 a, V32 b, V32 c, V32 d) {
  const F32 f;
  const V32 ac = hn::Add(hn::InterleaveLower(f, a, c), hn::InterleaveUpper(f, a, c));
  const V32 bd = hn::Add(hn::InterleaveLower(f, b, d), hn::InterleaveUpper(f, b, d));
  return fold_blocks(f, hn::Add(hn::InterleaveLower(f, ac, bd), hn::InterleaveUpper(f, ac, bd)));
}

/// Keys read side by side, each from its own run of the tile's keys and that in the order of
/// memory: the hardware's prefetching follows such streams, and one alone keeps too few reads in
/// flight.
constexpr int kStreams = kRegisters == 32 ? 4 : 2;

/// Calls body(keys, step) for all n keys of a tile: keys j, j + step, ... of which there are
/// decltype(keys)::value.
template <class Body>
HWY_INLINE void for_streams(int64_t n, const Body& body) {
  const int64_t run = n / kStreams;
  for (int64_t j = 0; j < run; ++j) body(std::integral_constant<int, kStreams>(), j, run);
  for (int64_t j = run * kStreams; j < n; ++j) body(std::integral_constant<int, 1>(), j, 0);
}

/// A tile of n keys of K or V: its rows of all heads of the task. The next tile ends at key `end`
/// at most.
struct DecodeTile {
  const char *at[kBc],
      *soon[kBc];  // of the first head: a key, and one that its stream comes to later
  int64_t head;    // bytes from a row to that of the next head
  int64_t bytes;   // of a row

  DecodeTile(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim, int64_t j,
             int64_t n, int64_t end)
      : head(layout.head * size_of(t.dtype)), bytes(dim * size_of(t.dtype)) {
    key_addresses(task, t, layout, j, n, at);
    std::copy_n(at, n, soon);
    const int64_t run = n / kStreams, next = std::min(kBc, end - j - n) / kStreams;
    const int64_t ahead = std::min(run, keys_ahead(task, layout));
    for (int64_t s = 0; s < kStreams; ++s) {
      const char** const to = std::copy_n(at + s * run + ahead, run - ahead, soon + s * run);
      key_addresses(task, t, layout, j + n + s * next, std::min(ahead, next), to);
    }
  }

  /// The row; asks for a later one.
  HWY_INLINE const char* row(int64_t j, int64_t i) const {
    const char* const later = soon[j] + i * head;
    for (int64_t byte = 0; byte < bytes; byte += 64) hwy::Prefetch(later + byte);
    return at[j] + i * head;
  }

 private:
  static constexpr int64_t kAhead = 1024;  // bytes

  static int64_t keys_ahead(const Task& task, const Layout& layout) {
    const int64_t stride = std::abs(key_stride(task.problem, layout)) * size_of(task.problem.dtype);
    return (kAhead + stride - 1) / std::max<int64_t>(1, stride);
  }
};

/// What a kv head of a task keeps from tile to tile, and its scores of the current one.
struct DecodeHead {
  Panel panel;
  float *Q, *O, *m, *l;  // [rows][round_up(d)], [rows][round_up(dv)], [width], [width]
  float* S;              // [kBc][width]
  float* alpha;          // [width]

  DecodeHead(const Task& task, int64_t rows, Arena& arena) {
    make_panel(task, 0, task.rows(), &panel);
    Q = arena.take(rows * round_up(task.problem.d, kLanes));
    O = arena.take(rows * round_up(task.problem.dv, kLanes));
    m = arena.take(panel.width());
    l = arena.take(panel.width());
    S = arena.take(kBc * panel.width());
    alpha = arena.take(panel.width());
  }
};

/// O = diag(alpha) O.
HWY_INLINE void scale_rows(const float* HWY_RESTRICT alpha, float* HWY_RESTRICT O, int64_t ldo,
                           int64_t rows) {
  const F32 f;
  for (int64_t r = 0; r < rows; ++r, O += ldo) {
    if (alpha[r] == 1) continue;
    const V32 scale = hn::Set(f, alpha[r]);
    for (int64_t c = 0; c < ldo; c += kLanes)
      hn::Store(hn::Mul(scale, hn::Load(f, O + c)), f, O + c);
  }
}

/// S[k][row] = K_k . Q[row] for kCount keys, apart by `lds` in S, and kRows rows.
template <DType kDType, int kCount, int kRows>
HWY_INLINE void dot_block(const char* const* K, int64_t d, const float* HWY_RESTRICT Q, int64_t ldq,
                          float* HWY_RESTRICT S, int64_t lds) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  const F32 f;
  V32 acc[kCount][kRows];
  FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
    FULGUR_UNROLL for (int i = 0; i < kRows; ++i) acc[k][i] = hn::Zero(f);
  }
  const auto step = [&](int64_t c, const auto& load) HWY_ATTR {
    V32 key[kCount];
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) key[k] = load(K[k] + c * kSize);
    FULGUR_UNROLL for (int i = 0; i < kRows; ++i) {
      const V32 query = hn::Load(f, Q + i * ldq + c);
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
        acc[k][i] = hn::MulAdd(key[k], query, acc[k][i]);
      }
    }
  };
  int64_t c = 0;
  for (; c + kLanes <= d; c += kLanes) {
    step(c, [](const char* at) HWY_ATTR { return load_wide<kDType>(at); });
  }
  if (c < d) step(c, [&](const char* at) HWY_ATTR { return load_tail<kDType>(at, d - c); });
  FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
    FULGUR_UNROLL for (int i = 0; i < kRows; i += 4) {
      hn::StoreU(sum_lanes(acc[k][i], acc[k][i + 1], acc[k][i + 2], acc[k][i + 3]),
                 hn::FixedTag<float, 4>(), S + k * lds + i);
    }
  }
}

/// S[k][row] = K_k . Q[row] for kCount keys and a multiple of kDecodeRows rows.
template <DType kDType, int kCount>
HWY_INLINE void dot_rows(const char* const (&K)[kCount], int64_t d, const float* HWY_RESTRICT Q,
                         int64_t ldq, int64_t rows, float* HWY_RESTRICT S, int64_t lds) {
  int64_t r = 0;
  // Where there are registers for it, eight rows share a load of K, two keys at a time.
  if constexpr (kCount == 4) {
    for (; r + 8 <= rows; r += 8) {
      dot_block<kDType, 2, 8>(K, d, Q + r * ldq, ldq, S + r, lds);
      dot_block<kDType, 2, 8>(K + 2, d, Q + r * ldq, ldq, S + 2 * lds + r, lds);
    }
  }
  for (; r < rows; r += kDecodeRows) {
    dot_block<kDType, kCount, kDecodeRows>(K, d, Q + r * ldq, ldq, S + r, lds);
  }
}

/// O[row][c] += sum_k P[k][row] V_k[c] for kVectors vectors of kCount keys, and a multiple of
/// kDecodeRows rows.
template <int kVectors, int kCount>
HWY_INLINE void add_vectors(const V32 (&V)[kCount][kVectors], const float* HWY_RESTRICT P,
                            int64_t ldp, float* HWY_RESTRICT O, int64_t ldo, int64_t rows) {
  const F32 f;
  for (int64_t r = 0; r < rows; ++r, O += ldo) {
    V32 acc[kVectors];
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) acc[v] = hn::Load(f, O + v * kLanes);
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
      const V32 p = hn::Set(f, P[k * ldp + r]);
      FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) acc[v] = hn::MulAdd(p, V[k][v], acc[v]);
    }
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) hn::Store(acc[v], f, O + v * kLanes);
  }
}

/// O[row] += sum_k P[k][row] V_k for kCount keys.
template <DType kDType, int kCount>
HWY_INLINE void add_rows(const char* const (&V)[kCount], int64_t dv, const float* HWY_RESTRICT P,
                         int64_t ldp, float* HWY_RESTRICT O, int64_t ldo, int64_t rows) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  constexpr int kWide = 4;
  int64_t c = 0;
  for (; c + kWide * kLanes <= dv; c += kWide * kLanes) {
    V32 value[kCount][kWide];
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
      FULGUR_UNROLL for (int v = 0; v < kWide; ++v) {
        value[k][v] = load_wide<kDType>(V[k] + (c + v * kLanes) * kSize);
      }
    }
    add_vectors<kWide, kCount>(value, P, ldp, O + c, ldo, rows);
  }
  for (; c < dv; c += kLanes) {
    V32 value[kCount][1];
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
      const char* const at = V[k] + c * kSize;
      value[k][0] = c + kLanes <= dv ? load_wide<kDType>(at) : load_tail<kDType>(at, dv - c);
    }
    add_vectors<1, kCount>(value, P, ldp, O + c, ldo, rows);
  }
}

/// S = K Q^T of n keys of every head.
template <DType kDType>
HWY_INLINE void dot_keys(const DecodeTile& K, int64_t n, int64_t d, int64_t rows,
                         const std::vector<DecodeHead>& heads) {
  for_streams(n, [&](auto keys, int64_t j, int64_t stream) HWY_ATTR {
    constexpr int kCount = decltype(keys)::value;
    for (size_t i = 0; i < heads.size(); ++i) {
      const int64_t width = heads[i].panel.width();
      const char* row[kCount];
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) row[k] = K.row(j + k * stream, i);
      dot_rows<kDType, kCount>(row, d, heads[i].Q, round_up(d, kLanes), rows,
                               heads[i].S + j * width, stream * width);
    }
  });
}

/// O = diag(alpha) O + P^T V with n keys, of every head.
template <DType kDType>
HWY_INLINE void add_values(const DecodeTile& V, int64_t n, int64_t dv, int64_t rows,
                           const std::vector<DecodeHead>& heads) {
  const int64_t ldo = round_up(dv, kLanes);
  for (const DecodeHead& s : heads) scale_rows(s.alpha, s.O, ldo, rows);
  for_streams(n, [&](auto keys, int64_t j, int64_t stream) HWY_ATTR {
    constexpr int kCount = decltype(keys)::value;
    for (size_t i = 0; i < heads.size(); ++i) {
      const int64_t width = heads[i].panel.width();
      const char* row[kCount];
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) row[k] = V.row(j + k * stream, i);
      add_rows<kDType, kCount>(row, dv, heads[i].S + j * width, stream * width, heads[i].O, ldo,
                               rows);
    }
  });
}

/// add_values where some row does not see some key: a masked key must not touch the row, as
/// 0 * NaN would.
HWY_NOINLINE void add_visible_values(const Task& task, const ForwardArgs& args, const Panel& panel,
                                     const KeyTile& tile, const float* HWY_RESTRICT P, int64_t ldp,
                                     const float* HWY_RESTRICT alpha, float* HWY_RESTRICT O,
                                     int64_t ldo) {
  const F32 f;
  const Problem& p = task.problem;
  const auto [j, n, partial] = tile;
  HWY_ALIGN float value[512 + kLanes];
  scale_rows(alpha, O, ldo, panel.count);
  for (int64_t jj = 0; jj < n; ++jj) {
    load_keys(task, args.v, p.v, p.dv, j + jj, 1, value, ldo);
    for (int64_t r = 0; r < panel.count; ++r) {
      if (!panel.sees(r, j + jj)) continue;
      const V32 weight = hn::Set(f, P[jj * ldp + r]);
      for (int64_t c = 0; c < ldo; c += kLanes) {
        float* o = O + r * ldo + c;
        hn::Store(hn::MulAdd(weight, hn::Load(f, value + c), hn::Load(f, o)), f, o);
      }
    }
  }
}

template <DType kDType>
HWY_INLINE void decode_of(const Task& first, const ForwardArgs& args, int64_t heads,
                          int64_t key_begin, int64_t key_end, float* states, float* scratch) {
  const Problem& p = first.problem;
  const int64_t ldq = round_up(p.d, kLanes), ldo = round_up(p.dv, kLanes);
  const int64_t rows = round_up(first.rows(), kDecodeRows);
  const kernels::DropoutMask& dropout = first.given.dropout;
  const float factor = query_factor(p);
  const auto task = [&](int64_t i) {
    return Task{p, first.given, first.s, first.keys, first.b, first.kv + i};
  };

  Arena arena(scratch);
  std::vector<DecodeHead> state;
  state.reserve(heads);
  for (int64_t i = 0; i < heads; ++i) {
    const DecodeHead& s = state.emplace_back(task(i), rows, arena);
    load_queries(task(i), args.q, p.q, p.d, 0, s.panel.count, rows, s.Q, ldq);
    for (int64_t at = 0; at < rows * ldq; ++at) s.Q[at] *= factor;
    std::fill_n(s.O, rows * ldo, 0.0f);
    std::fill_n(s.m, s.panel.width(), -std::numeric_limits<float>::infinity());
    std::fill_n(s.l, s.panel.width(), 0.0f);
    std::fill_n(s.S, kBc * s.panel.width(), 0.0f);
  }

  KeyTiles tiles = state[0].panel.tiles({key_begin, key_end});  // the same for every head
  for (; !tiles.done(); tiles.next()) {
    const KeyTile tile = tiles.tile();
    const auto [j, n, partial] = tile;
    dot_keys<kDType>(DecodeTile(first, args.k, p.k, p.d, j, n, key_end), n, p.d, rows, state);
    for (const DecodeHead& s : state) {
      score_rule(p, s.panel, tile, s.S, s.panel.width(), nullptr);
      online_softmax(s.panel, n, s.S, s.panel.width(), s.m, s.l, s.alpha);
      if (p.dropout_p > 0) {
        drop(dropout, static_cast<float>(1 / (1 - p.dropout_p)), s.panel, tile, s.panel.width(),
             s.S, nullptr);
      }
    }
    if (partial) {
      for (int64_t i = 0; i < heads; ++i) {
        const DecodeHead& s = state[i];
        add_visible_values(task(i), args, s.panel, tile, s.S, s.panel.width(), s.alpha, s.O, ldo);
      }
    } else {
      add_values<kDType>(DecodeTile(first, args.v, p.v, p.dv, j, n, key_end), n, p.dv, rows, state);
    }
  }
  for (int64_t i = 0; i < heads; ++i) {
    for (int64_t r = 0; r < first.rows(); ++r, states += p.dv + 2) {
      std::copy_n(state[i].O + r * ldo, p.dv, states);
      states[p.dv] = state[i].m[r];
      states[p.dv + 1] = state[i].l[r];
    }
  }
}

inline int64_t decode_scratch(const Problem& p, int64_t heads, int64_t rows) {
  rows = round_up(rows, kLanes);
  return heads * (rows * (round_up(p.d, kLanes) + round_up(p.dv, kLanes) + kBc + 3) + 6 * 16);
}

void decode(const Task& first, const ForwardArgs& args, int64_t heads, int64_t key_begin,
            int64_t key_end, float* states, float* scratch) {
  switch (first.problem.dtype) {
    case DType::kF16:
      return decode_of<DType::kF16>(first, args, heads, key_begin, key_end, states, scratch);
    case DType::kBF16:
      return decode_of<DType::kBF16>(first, args, heads, key_begin, key_end, states, scratch);
    default:
      return decode_of<DType::kF32>(first, args, heads, key_begin, key_end, states, scratch);
  }
}

/// m = max m_i, l = sum 2^(m_i - m) l_i, O = sum 2^(m_i - m) O_i / l; then the sink joins.
void decode_merge(const Task& task, const ForwardArgs& args, const float* states, int64_t splits,
                  int64_t split_stride) {
  const Problem& p = task.problem;
  HWY_ALIGN float o[512 + kLanes];
  for (int64_t r = 0; r < task.rows(); ++r) {
    const auto state = [&](int64_t i) { return states + i * split_stride + r * (p.dv + 2); };
    float m = -std::numeric_limits<float>::infinity(), l = 0;
    for (int64_t i = 0; i < splits; ++i) m = std::fmax(m, state(i)[p.dv]);
    std::fill(o, o + round_up(p.dv, kLanes), 0.0f);
    for (int64_t i = 0; i < splits; ++i) {
      const float* part = state(i);
      if (part[p.dv + 1] == 0) continue;  // saw no key
      const float weight = std::exp2(part[p.dv] - m);
      l += weight * part[p.dv + 1];
      for (int64_t c = 0; c < p.dv; ++c) o[c] += weight * part[c];
    }
    const RowEnd end = end_row(task, r, m, l);
    for (int64_t c = 0; c < p.dv; ++c) o[c] = l == 0 ? 0 : end.weight * o[c] / l;
    store_row(args.out.dtype, o, p.dv, address(args.out, row_offset(task, p.out, r)));
    if (!p.want_lse) continue;
    static_cast<float*>(args.lse.data)[row_offset(task, p.lse, r)] = end.lse;
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
