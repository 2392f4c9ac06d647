// The products of decoding (decode-inl.h): scores of some rows and keys, and sums of V that they
// weigh. Keys are widened as they are loaded, and rows share their loads.
#if defined(FULGUR_CPU_DECODE_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_DECODE_PRODUCTS_INL_H_
#undef FULGUR_CPU_DECODE_PRODUCTS_INL_H_
#else
#define FULGUR_CPU_DECODE_PRODUCTS_INL_H_
#endif

#include "cpu/kernels/simd/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

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

/// Products of elements widened to f32.
template <DType kDType>
struct Widened {
  using Element = float;  // the elements of Q
  using Vector = V32;
  static constexpr int64_t kElements = kLanes;  // elements of a vector
  // The columns of a block of codes, which share its scale, are read together.
  static constexpr int64_t kStep = is_low_bit(kDType) ? 32 : kLanes;

  /// The codes of a block, and their scale.
  static HWY_INLINE Vector code(const char* row, int64_t c) requires(has_block_scales(kDType)) {
    return load_block_codes<kDType>(row, c);
  }
  static HWY_INLINE Vector scale(const char* row, int64_t c) requires(has_block_scales(kDType)) {
    return block_scale<kDType>(row, c);
  }
  static HWY_INLINE Vector key(const char* row, int64_t c) { return load_numbers<kDType>(row, c); }
  static HWY_INLINE Vector key(const char* row, int64_t c, int64_t n) {
    return load_last_numbers<kDType>(row, c, n);
  }
  static HWY_INLINE Vector query(const Element* at) { return hn::Load(F32(), at); }
  static HWY_INLINE V32 add(V32 sum, Vector a, Vector b) { return hn::MulAdd(a, b, sum); }

  /// Loads Q [count][ldq] of a task's rows; returns the factor by which scores are still to be
  /// scaled.
  static float load(const Task& task, const ForwardArgs& args, int64_t count, Element* Q,
                    int64_t ldq) {
    const Problem& p = task.problem;
    load_queries(task, args.q, p.q, p.d, 0, count, count, Q, ldq, task.given.scaling.q);
    for (int64_t i = 0; i < count * ldq; ++i) Q[i] *= query_factor(p);
    return 1;
  }
};

/// S[k][row] = factor K_k . Q[row] for kRows rows and kCount keys, which are `lds` floats apart in
/// S.
template <class Products, int kCount, int kRows>
HWY_INLINE void dot_block(const char* const* K, int64_t d,
                          const typename Products::Element* HWY_RESTRICT Q, int64_t ldq,
                          float factor, float* HWY_RESTRICT S, int64_t lds) {
  using Vector = typename Products::Vector;
  constexpr int64_t kElements = Products::kElements;
  constexpr int kDots = kCount * kRows;
  const F32 f;
  const hn::FixedTag<float, 4> four;
  V32 acc[kDots];
  FULGUR_UNROLL for (int at = 0; at < kDots; ++at) acc[at] = hn::Zero(f);
  const auto step = [&](int64_t c, const auto& load) HWY_ATTR {
    Vector key[kCount];
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) key[k] = load(K[k], c);
    FULGUR_UNROLL for (int i = 0; i < kRows; ++i) {
      const Vector query = Products::query(Q + i * ldq + c);
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
        acc[k * kRows + i] = Products::add(acc[k * kRows + i], key[k], query);
      }
    }
  };
  const auto whole = [](const char* row, int64_t at) HWY_ATTR { return Products::key(row, at); };
  int64_t c = 0;
  if constexpr (kRows < 4 && requires { Products::scale(*K, c); }) {
    // The scale of a block times its sum: fewer products than with each code, where rows are few.
    for (; c < d; c += Products::kStep) {
      V32 part[kDots];
      FULGUR_UNROLL for (int at = 0; at < kDots; ++at) part[at] = hn::Zero(f);
      FULGUR_UNROLL for (int64_t e = 0; e < Products::kStep; e += kElements) {
        FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
          const Vector code = Products::code(K[k], c + e);
          FULGUR_UNROLL for (int i = 0; i < kRows; ++i) {
            V32& to = part[k * kRows + i];
            const Vector query = Products::query(Q + i * ldq + c + e);
            to = e == 0 ? hn::Mul(code, query) : Products::add(to, code, query);
          }
        }
      }
      FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
        const V32 scale = Products::scale(K[k], c);
        FULGUR_UNROLL for (int i = 0; i < kRows; ++i) {
          acc[k * kRows + i] = hn::MulAdd(scale, part[k * kRows + i], acc[k * kRows + i]);
        }
      }
    }
  } else if constexpr (Products::kStep > kElements) {
    for (; c + Products::kStep <= d; c += Products::kStep) {
      FULGUR_UNROLL for (int64_t i = 0; i < Products::kStep; i += kElements) step(c + i, whole);
    }
  }
  for (; c + kElements <= d; c += kElements) step(c, whole);
  if (c < d) {
    step(c, [&](const char* row, int64_t at) HWY_ATTR { return Products::key(row, at, d - at); });
  }
  FULGUR_UNROLL for (int at = 0; at < kDots; at += 4) {
    const auto sum = [&](int i) HWY_ATTR { return at + i < kDots ? acc[at + i] : hn::Zero(f); };
    const auto sums = hn::Mul(sum_lanes(sum(0), sum(1), sum(2), sum(3)), hn::Set(four, factor));
    if constexpr (kRows >= 4) {
      hn::StoreU(sums, four, S + at / kRows * lds + at % kRows);
    } else {
      HWY_ALIGN float some[4];
      hn::Store(sums, four, some);
      for (int i = 0; i < 4 && at + i < kDots; i += kRows) {
        std::copy_n(some + i, kRows, S + (at + i) / kRows * lds);
      }
    }
  }
}

/// Calls body(count, r) for blocks of `count` rows from r on: of kMax, a power of 2, then of fewer.
template <int kMax, class Body>
HWY_INLINE void for_rows(int64_t rows, const Body& body, int64_t r = 0) {
  for (; r + kMax <= rows; r += kMax) body(std::integral_constant<int, kMax>(), r);
  if constexpr (kMax > 1) {
    if (r < rows) for_rows<kMax / 2>(rows, body, r);
  }
}

/// S[k][row] = factor K_k . Q[row] for kCount keys.
template <class Products, int kCount>
HWY_INLINE void dot_rows(const char* const (&K)[kCount], int64_t d,
                         const typename Products::Element* HWY_RESTRICT Q, int64_t ldq,
                         float factor, int64_t rows, float* HWY_RESTRICT S, int64_t lds) {
  // If there are enough registers, eight rows share a load of K, two keys at a time.
  constexpr int kMax = kCount == 4 ? 8 : 4;
  for_rows<kMax>(rows, [&](auto count, int64_t r) HWY_ATTR {
    constexpr int kRows = decltype(count)::value;
    constexpr int kKeys = kRows == 8 ? 2 : kCount;
    for (int k = 0; k < kCount; k += kKeys) {
      dot_block<Products, kKeys, kRows>(K + k, d, Q + r * ldq, ldq, factor, S + k * lds + r, lds);
    }
  });
}

/// O[row][c] += sum_k P[k][row] V_k[c] for kVectors vectors of kCount keys.
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

/// O[c] += sum_k P[k] V_k[c] of one row, for kVectors vectors from column `c` of blocks of codes,
/// whose scales are multiplied with P.
template <DType kDType, int kVectors, int kCount>
HWY_INLINE void add_blocks(const char* const (&V)[kCount], int64_t c, const float* HWY_RESTRICT P,
                           int64_t ldp, float* HWY_RESTRICT O) {
  const F32 f;
  V32 acc[kVectors];
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) acc[v] = hn::Load(f, O + v * kLanes);
  FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
    const V32 p = hn::Set(f, P[k * ldp]);
    V32 weight = hn::Zero(f);
    FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) {
      const int64_t at = c + v * kLanes;
      if (v * kLanes % Format<kDType>::kBlock == 0) {  // another block begins
        weight = hn::Mul(p, block_scale<kDType>(V[k], at));
      }
      acc[v] = hn::MulAdd(weight, load_block_codes<kDType>(V[k], at), acc[v]);
    }
  }
  FULGUR_UNROLL for (int v = 0; v < kVectors; ++v) hn::Store(acc[v], f, O + v * kLanes);
}

/// O[row] += sum_k P[k][row] V_k for kCount keys.
template <DType kDType, int kCount>
HWY_INLINE void add_rows(const char* const (&V)[kCount], int64_t dv, const float* HWY_RESTRICT P,
                         int64_t ldp, float* HWY_RESTRICT O, int64_t ldo, int64_t rows) {
  constexpr int kWide = 4;
  int64_t c = 0;
  for (; c + kWide * kLanes <= dv; c += kWide * kLanes) {
    if constexpr (has_block_scales(kDType)) {
      if (rows == 1) {
        add_blocks<kDType, kWide, kCount>(V, c, P, ldp, O + c);
        continue;
      }
    }
    V32 value[kCount][kWide];
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
      FULGUR_UNROLL for (int v = 0; v < kWide; ++v) {
        value[k][v] = load_numbers<kDType>(V[k], c + v * kLanes);
      }
    }
    add_vectors<kWide, kCount>(value, P, ldp, O + c, ldo, rows);
  }
  for (; c < dv; c += kLanes) {
    V32 value[kCount][1];
    FULGUR_UNROLL for (int k = 0; k < kCount; ++k) {
      value[k][0] = c + kLanes <= dv ? load_numbers<kDType>(V[k], c)
                                     : load_last_numbers<kDType>(V[k], c, dv - c);
    }
    add_vectors<1, kCount>(value, P, ldp, O + c, ldo, rows);
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
