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

/// Asks for the next tile of K and V in the order of memory, as four streams side by side: the
/// hardware's own prefetching follows such streams, and one alone keeps too few reads in flight.
class Ahead {
 public:
  Ahead(const Task& first, const ForwardArgs& args, int64_t heads, int64_t key) : heads_(heads) {
    const Problem& p = first.problem;
    for (int64_t i = 0; i < 4; ++i) {  // both halves of the tile, K and V in turn
      const int64_t row = first.s.k_begin + key + i / 2 * (kBc / 2), size = size_of(p.dtype);
      const Tensor& t = i % 2 == 0 ? args.k : args.v;
      const Layout& layout = i % 2 == 0 ? p.k : p.v;
      streams_[i].row = address<const char>(t, layout.offset(first.b, row, first.kv));
      streams_[i].next_head = layout.head * size;
      streams_[i].next_key = (layout.row - (heads - 1) * layout.head) * size;
      streams_[i].bytes = (i % 2 == 0 ? p.d : p.dv) * size;
    }
  }
  HWY_INLINE void next_row() {
    Stream& s = streams_[turn_++ % 4];
    for (int64_t at = 0; at < s.bytes; at += 64) hwy::Prefetch(s.row + at);
    const bool last = ++s.head == heads_;
    s.row += last ? s.next_key : s.next_head;
    if (last) s.head = 0;
  }

 private:
  struct Stream {
    const char* row;
    int64_t next_head, next_key, bytes, head = 0;
  };
  Stream streams_[4];
  int64_t heads_;
  uint64_t turn_ = 0;
};

/// S[key][row] = K[key] . Q[row] for n keys and a multiple of kDecodeRows rows.
template <DType kDType>
HWY_INLINE void dot_keys(const char* K, int64_t stride_bytes, int64_t n, int64_t d,
                         const float* HWY_RESTRICT Q, int64_t ldq, int64_t rows,
                         float* HWY_RESTRICT S, int64_t lds, Ahead& ahead) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  constexpr int kKeys = kRegisters == 32 ? 4 : 2;
  const F32 f;
  const auto block = [&]<int kCount>(int64_t jj) HWY_ATTR {
    for (int k = 0; k < kCount; ++k) ahead.next_row();
    for (int64_t r = 0; r < rows; r += kDecodeRows) {
      V32 acc[kCount][kDecodeRows];
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
        FULGUR_UNROLL for (int i = 0; i < kDecodeRows; ++i) acc[k][i] = hn::Zero(f);
      }
      const auto step = [&](int64_t c, const auto& load) HWY_ATTR {
        V32 q[kDecodeRows];
        FULGUR_UNROLL for (int i = 0; i < kDecodeRows; ++i) {
          q[i] = hn::Load(f, Q + (r + i) * ldq + c);
        }
        FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
          const V32 key = load(K + (jj + k) * stride_bytes + c * kSize);
          FULGUR_UNROLL for (int i = 0; i < kDecodeRows; ++i) {
            acc[k][i] = hn::MulAdd(key, q[i], acc[k][i]);
          }
        }
      };
      int64_t c = 0;
      for (; c + kLanes <= d; c += kLanes) {
        step(c, [](const char* at) HWY_ATTR { return load_wide<kDType>(at); });
      }
      if (c < d) {
        step(c, [&](const char* at) HWY_ATTR {
          alignas(64) char tail[kLanes * sizeof(float)] = {};
          std::memcpy(tail, at, (d - c) * kSize);
          return load_wide<kDType>(tail);
        });
      }
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
        hn::StoreU(sum_lanes(acc[k][0], acc[k][1], acc[k][2], acc[k][3]), hn::FixedTag<float, 4>(),
                   S + (jj + k) * lds + r);
      }
    }
  };
  int64_t jj = 0;
  for (; jj + kKeys <= n; jj += kKeys) block.template operator()<kKeys>(jj);
  for (; jj < n; ++jj) block.template operator()<1>(jj);
}

/// O[row][c] = alpha[row] O[row][c] + sum_key P[key][row] V[key][c] for a multiple of kDecodeRows
/// rows.
template <DType kDType>
HWY_INLINE void add_values(const char* V, int64_t stride_bytes, int64_t n, int64_t dv,
                           const float* HWY_RESTRICT P, int64_t ldp,
                           const float* HWY_RESTRICT alpha, float* HWY_RESTRICT O, int64_t ldo,
                           int64_t rows, Ahead& ahead) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  constexpr int kWide = kRegisters == 32 ? 4 : 2;
  const F32 f;
  const auto block = [&]<int kCount>(int64_t c, const auto& load) HWY_ATTR {
    for (int64_t r = 0; r < rows; r += kDecodeRows) {
      V32 acc[kDecodeRows][kCount];
      FULGUR_UNROLL for (int i = 0; i < kDecodeRows; ++i) {
        const V32 scale = hn::Set(f, alpha[r + i]);
        FULGUR_UNROLL for (int v = 0; v < kCount; ++v) {
          acc[i][v] = hn::Mul(scale, hn::Load(f, O + (r + i) * ldo + c + v * kLanes));
        }
      }
      for (int64_t jj = 0; jj < n; ++jj) {
        if (r == 0 && c == 0) ahead.next_row();
        V32 value[kCount];
        FULGUR_UNROLL for (int v = 0; v < kCount; ++v) {
          value[v] = load(V + jj * stride_bytes + (c + v * kLanes) * kSize);
        }
        FULGUR_UNROLL for (int i = 0; i < kDecodeRows; ++i) {
          const V32 p = hn::Set(f, P[jj * ldp + r + i]);
          FULGUR_UNROLL for (int v = 0; v < kCount; ++v) {
            acc[i][v] = hn::MulAdd(p, value[v], acc[i][v]);
          }
        }
      }
      FULGUR_UNROLL for (int i = 0; i < kDecodeRows; ++i) {
        FULGUR_UNROLL for (int v = 0; v < kCount; ++v) {
          hn::Store(acc[i][v], f, O + (r + i) * ldo + c + v * kLanes);
        }
      }
    }
  };
  const auto whole = [](const char* at) HWY_ATTR { return load_wide<kDType>(at); };
  int64_t c = 0;
  for (; c + kWide * kLanes <= dv; c += kWide * kLanes) block.template operator()<kWide>(c, whole);
  for (; c + kLanes <= dv; c += kLanes) block.template operator()<1>(c, whole);
  if (c < dv) {
    block.template operator()<1>(c, [&](const char* at) HWY_ATTR {
      alignas(64) char tail[kLanes * sizeof(float)] = {};
      std::memcpy(tail, at, (dv - c) * kSize);
      return load_wide<kDType>(tail);
    });
  }
}

/// add_values where some row does not see some key: a masked key must not touch the row, as
/// 0 * NaN would.
HWY_NOINLINE void add_visible_values(const Task& task, const ForwardArgs& args, const Panel& panel,
                                     int64_t j, int64_t n, const float* HWY_RESTRICT P, int64_t ldp,
                                     const float* HWY_RESTRICT alpha, float* HWY_RESTRICT O,
                                     int64_t ldo) {
  const F32 f;
  const Problem& p = task.problem;
  HWY_ALIGN float value[512 + kLanes];
  for (int64_t r = 0; r < panel.count; ++r) {
    for (int64_t c = 0; c < ldo; ++c) O[r * ldo + c] *= alpha[r];
  }
  for (int64_t jj = 0; jj < n; ++jj) {
    load_keys(task, args.v, p.v, p.dv, j + jj, 1, value, ldo);
    for (int64_t r = 0; r < panel.count; ++r) {
      if (j + jj < panel.begin[r] || j + jj >= panel.end[r]) continue;
      const V32 weight = hn::Set(f, P[jj * ldp + r]);
      for (int64_t c = 0; c < ldo; c += kLanes) {
        float* o = O + r * ldo + c;
        hn::Store(hn::MulAdd(weight, hn::Load(f, value + c), hn::Load(f, o)), f, o);
      }
    }
  }
}

/// What a kv head of a task keeps from tile to tile.
struct DecodeHead {
  Panel panel;
  float *Q, *O, *m, *l;  // [rows][round_up(d)], [rows][round_up(dv)], [width], [width]

  DecodeHead(const Task& task, int64_t rows, Arena& arena) {
    make_panel(task, 0, task.rows(), &panel);
    Q = arena.take(rows * round_up(task.problem.d, kLanes));
    O = arena.take(rows * round_up(task.problem.dv, kLanes));
    m = arena.take(panel.width());
    l = arena.take(panel.width());
  }
};

template <DType kDType>
HWY_INLINE void decode_of(const Task& first, const ForwardArgs& args, int64_t heads,
                          int64_t key_begin, int64_t key_end, float* states, float* scratch) {
  const Problem& p = first.problem;
  const int64_t ldq = round_up(p.d, kLanes), ldo = round_up(p.dv, kLanes);
  const int64_t size = size_of(p.dtype), rows = round_up(first.rows(), kDecodeRows);
  const DropoutMask dropout(p.dropout.p, p.dropout.seed, p.dropout.offset);
  const float factor = query_factor(p);
  HWY_ALIGN float alpha[kPanelRows];
  const auto task = [&](int64_t i) { return Task{p, first.s, first.b, first.kv + i}; };

  Arena arena(scratch);
  float* const S = arena.take(kBc * kPanelRows);
  std::fill_n(S, kBc * kPanelRows, 0.0f);
  std::vector<DecodeHead> state;
  state.reserve(heads);
  for (int64_t i = 0; i < heads; ++i) {
    const DecodeHead& s = state.emplace_back(task(i), rows, arena);
    load_queries(task(i), args.q, p.q, p.d, 0, s.panel.count, rows, s.Q, ldq);
    for (int64_t at = 0; at < rows * ldq; ++at) s.Q[at] *= factor;
    std::fill_n(s.O, rows * ldo, 0.0f);
    std::fill_n(s.m, s.panel.width(), -std::numeric_limits<float>::infinity());
    std::fill_n(s.l, s.panel.width(), 0.0f);
  }

  const KeyRange any = state[0].panel.any;  // the same for every head
  const int64_t begin = std::max(key_begin, any.begin / kBc * kBc),
                end = std::min(key_end, any.end);
  for (int64_t j = begin; j < end; j += kBc) {
    const int64_t n = std::min(kBc, key_end - j), row = first.s.k_begin + j;
    // Past the last tile this asks for memory that may not exist, which a prefetch may.
    Ahead ahead(first, args, heads, j + kBc);
    for (int64_t i = 0; i < heads; ++i) {
      const DecodeHead& s = state[i];
      const int64_t width = s.panel.width();
      const auto* K = address<const char>(args.k, p.k.offset(first.b, row, first.kv + i));
      const auto* V = address<const char>(args.v, p.v.offset(first.b, row, first.kv + i));
      dot_keys<kDType>(K, p.k.row * size, n, p.d, s.Q, ldq, rows, S, width, ahead);
      score_rule(p, s.panel, j, n, S, width, nullptr);
      online_softmax(s.panel, n, S, width, s.m, s.l, alpha);
      if (p.dropout.p > 0) {
        drop(dropout, static_cast<float>(1 / (1 - p.dropout.p)), s.panel, j, n, width, S, nullptr);
      }
      if (s.panel.partial(j, n)) {
        add_visible_values(task(i), args, s.panel, j, n, S, width, alpha, s.O, ldo);
      } else {
        add_values<kDType>(V, p.v.row * size, n, p.dv, S, width, alpha, s.O, ldo, rows, ahead);
      }
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

inline int64_t decode_scratch(const Problem& p, int64_t heads) {
  const int64_t rows = round_up(p.group() * p.sq, kLanes);
  return kBc * kPanelRows +
         heads * (rows * (round_up(p.d, kLanes) + round_up(p.dv, kLanes)) + 2 * rows + 4 * 16);
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

/// m = max m_i, l = sum 2^(m_i - m) l_i, O = sum 2^(m_i - m) O_i / l.
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
    for (int64_t c = 0; c < p.dv; ++c) o[c] = l == 0 ? 0 : o[c] / l;
    store_row(args.out.dtype, o, p.dv, address<void>(args.out, row_offset(task, p.out, r)));
    if (!p.want_lse) continue;
    static_cast<float*>(args.lse.data)[row_offset(task, p.lse, r)] =
        l == 0 ? -std::numeric_limits<float>::infinity() : (m + std::log2(l)) * kLn2;
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
