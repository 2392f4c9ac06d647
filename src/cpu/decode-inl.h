// FlashAttention-3's split-KV for few query rows: a task takes a part of the keys and leaves an
// unnormalized state; merging the states gives O and LSE. K and V are read once from memory and
// widened in registers: lanes run along the head dim, where the memory is contiguous.
#if defined(FULGUR_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_DECODE_INL_H_
#undef FULGUR_CPU_DECODE_INL_H_
#else
#define FULGUR_CPU_DECODE_INL_H_
#endif

#include "cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// Rows whose dot products share a load of K, and whose O shares a load of V.
constexpr int64_t kDecodeRows = 4;

struct DecodeScratch {
  float* Q;      // [round_up(rows, kDecodeRows)][round_up(d)]
  float* O;      // [rows, rounded up][round_up(dv)]
  float* S;      // [kBc][width]
  float *m, *l;  // [kPanelRows]

  DecodeScratch(const Problem& p, Arena& arena) {
    Q = arena.take(kPanelRows * round_up(p.d, kLanes));
    O = arena.take(kPanelRows * round_up(p.dv, kLanes));
    S = arena.take(kBc * kPanelRows);
    m = arena.take(kPanelRows);
    l = arena.take(kPanelRows);
  }
};

inline int64_t decode_scratch(const Problem& p) {
  Arena arena(nullptr);
  DecodeScratch(p, arena);
  return arena.used();
}

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

/// S[key][row] = K[key] . Q[row] for n keys and a multiple of kDecodeRows rows.
template <DType kDType>
HWY_INLINE void dot_keys(const char* K, int64_t stride_bytes, int64_t n, int64_t d,
                         const float* HWY_RESTRICT Q, int64_t ldq, int64_t rows,
                         float* HWY_RESTRICT S, int64_t lds) {
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  constexpr int kKeys = kRegisters == 32 ? 4 : 2;
  const F32 f;
  const auto block = [&]<int kCount>(int64_t jj) HWY_ATTR {
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
                           int64_t rows) {
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

template <DType kDType>
HWY_INLINE void decode_of(const Task& task, const ForwardArgs& args, int64_t key_begin,
                          int64_t key_end, float* state, float* scratch) {
  const Problem& p = task.problem;
  Arena arena(scratch);
  const DecodeScratch s(p, arena);
  const int64_t ldq = round_up(p.d, kLanes), ldo = round_up(p.dv, kLanes);
  const int64_t size = size_of(p.dtype), rows = round_up(task.rows(), kDecodeRows);
  const DropoutMask dropout(p.dropout.p, p.dropout.seed, p.dropout.offset);
  HWY_ALIGN float alpha[kPanelRows];

  Panel panel;
  make_panel(task, 0, task.rows(), &panel);
  load_queries(task, args.q, p.q, p.d, 0, panel.count, rows, s.Q, ldq);
  const float factor = query_factor(p);
  for (int64_t i = 0; i < rows * ldq; ++i) s.Q[i] *= factor;
  std::fill_n(s.O, rows * ldo, 0.0f);
  std::fill_n(s.m, kPanelRows, -std::numeric_limits<float>::infinity());
  std::fill_n(s.l, kPanelRows, 0.0f);
  std::fill_n(s.S, kBc * panel.width(), 0.0f);

  const int64_t width = panel.width();
  const int64_t begin = std::max(key_begin, panel.any.begin / kBc * kBc);
  for (int64_t j = begin; j < std::min(key_end, panel.any.end); j += kBc) {
    const int64_t n = std::min({kBc, key_end - j, task.s.sk - j});
    const auto* K = address<const char>(args.k, p.k.offset(task.b, task.s.k_begin + j, task.kv));
    const auto* V = address<const char>(args.v, p.v.offset(task.b, task.s.k_begin + j, task.kv));
    dot_keys<kDType>(K, p.k.row * size, n, p.d, s.Q, ldq, rows, s.S, width);
    score_rule(p, panel, j, n, s.S, width, nullptr);
    online_softmax(panel, n, s.S, width, s.m, s.l, alpha);
    if (p.dropout.p > 0) {
      drop(dropout, static_cast<float>(1 / (1 - p.dropout.p)), panel, j, n, width, s.S, nullptr);
    }
    if (panel.partial(j, n)) {
      add_visible_values(task, args, panel, j, n, s.S, width, alpha, s.O, ldo);
    } else {
      add_values<kDType>(V, p.v.row * size, n, p.dv, s.S, width, alpha, s.O, ldo, rows);
    }
  }
  for (int64_t r = 0; r < panel.count; ++r) {
    float* row = state + r * (p.dv + 2);
    std::copy_n(s.O + r * ldo, p.dv, row);
    row[p.dv] = s.m[r];
    row[p.dv + 1] = s.l[r];
  }
}

void decode(const Task& task, const ForwardArgs& args, int64_t key_begin, int64_t key_end,
            float* state, float* scratch) {
  switch (task.problem.dtype) {
    case DType::kF16:
      return decode_of<DType::kF16>(task, args, key_begin, key_end, state, scratch);
    case DType::kBF16:
      return decode_of<DType::kBF16>(task, args, key_begin, key_end, state, scratch);
    default:
      return decode_of<DType::kF32>(task, args, key_begin, key_end, state, scratch);
  }
}

/// m = max m_i, l = sum 2^(m_i - m) l_i, O = sum 2^(m_i - m) O_i / l.
void decode_merge(const Task& task, const ForwardArgs& args, const float* states, int64_t splits) {
  const Problem& p = task.problem;
  const int64_t stride = p.dv + 2;
  HWY_ALIGN float o[512 + kLanes];
  for (int64_t r = 0; r < task.rows(); ++r) {
    const auto state = [&](int64_t i) { return states + (i * task.rows() + r) * stride; };
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
