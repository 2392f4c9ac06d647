// The matrix product of the f32 kernels: broadcast A, vectors of B, a block of C in registers.
#if defined(FULGUR_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_GEMM_INL_H_
#undef FULGUR_CPU_GEMM_INL_H_
#else
#define FULGUR_CPU_GEMM_INL_H_
#endif

#include "cpu/kernels/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// A matrix read by scalars: element (m, k) is data[m * row + k * col].
struct Scalars {
  const float* data;
  int64_t row, col;
};

/// Row-major vectors: row k starts at data[k * stride]; stride is a multiple of the lanes.
struct Vectors {
  const float* data;
  int64_t stride;
};

/// Whether a product overwrites C, adds to C, or scales and adds to C.
enum class Init { kZero, kAdd, kScaleAdd };

/// Rows of memory that are prefetched while products are computed, `step` rows at a time: a CPU has
/// few reads in flight, and more prefetches at once do less or delay other reads.
struct RowPrefetch {
  const char* from = nullptr;     // the first byte to fetch of a row of offset 0
  const int64_t* rows = nullptr;  // the offsets of the rows that are left, in elements
  int64_t size = 0;               // bytes of an element
  int64_t bytes = 0;              // to fetch of each row
  int64_t count = 0;              // rows that are left
  int64_t step = 0;
  bool to_l2 = false;           // to the L2 cache alone: the rows do not fit the L1 cache
  RowPrefetch* also = nullptr;  // others, which are prefetched with these

  HWY_INLINE void next() {
    for (RowPrefetch* one = this; one != nullptr; one = one->also) {
      if (one->count > 0) one->fetch();
    }
  }
  void finish() {
    for (RowPrefetch* one = this; one != nullptr; one = one->also) {
      while (one->count > 0) one->fetch();
    }
  }

 private:
  HWY_NOINLINE void fetch() {
    const int64_t* const end = rows + std::min(step, count);
    count -= end - rows;
    for (; rows < end; ++rows) {
      const char* const row = from + *rows * size;
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        to_l2 ? __builtin_prefetch(row + byte, 0, 2) : __builtin_prefetch(row + byte);
      }
    }
  }
};

/// C[m][n] = sum_k A(m, k) B[k][n]            (kZero)
/// C[m][n] += ...                             (kAdd)
/// C[m][n] = scale[n] C[m][n] + ...           (kScaleAdd)
/// for MR rows and NV vectors of C, all held in registers. What C held is added last: a
/// sum over many calls is then one of sums, with fewer roundings in a row.
template <Init kInit, int MR, int NV>
HWY_INLINE void gemm_block(int64_t K, Scalars A, Vectors B, float* HWY_RESTRICT C, int64_t ldc,
                           const float* HWY_RESTRICT scale) {
  const F32 f;
  V32 acc[MR][NV];
  FULGUR_UNROLL for (int m = 0; m < MR; ++m) {
    FULGUR_UNROLL for (int n = 0; n < NV; ++n) acc[m][n] = hn::Zero(f);
  }
  const float* HWY_RESTRICT a = A.data;
  const float* HWY_RESTRICT b = B.data;
  HWY_UNROLL(4) for (int64_t k = 0; k < K; ++k, a += A.col, b += B.stride) {
    V32 bv[NV];
    FULGUR_UNROLL for (int n = 0; n < NV; ++n) bv[n] = hn::Load(f, b + n * kLanes);
    FULGUR_UNROLL for (int m = 0; m < MR; ++m) {
      const V32 am = hn::Set(f, a[m * A.row]);
      FULGUR_UNROLL for (int n = 0; n < NV; ++n) acc[m][n] = hn::MulAdd(am, bv[n], acc[m][n]);
    }
  }
  FULGUR_UNROLL for (int m = 0; m < MR; ++m) {
    FULGUR_UNROLL for (int n = 0; n < NV; ++n) {
      float* const c = C + m * ldc + n * kLanes;
      V32 sum = acc[m][n];
      if constexpr (kInit == Init::kAdd) sum = hn::Add(sum, hn::Load(f, c));
      if constexpr (kInit == Init::kScaleAdd) {
        sum = hn::MulAdd(hn::Load(f, scale + n * kLanes), hn::Load(f, c), sum);
      }
      hn::Store(sum, f, c);
    }
  }
}

/// Rows [m, M) in blocks of MR, the rest in halves.
template <Init kInit, int MR, int NV>
HWY_INLINE void gemm_rows(int64_t m, int64_t M, int64_t K, Scalars A, Vectors B,
                          float* HWY_RESTRICT C, int64_t ldc, const float* HWY_RESTRICT scale,
                          RowPrefetch* prefetch) {
  for (; m + MR <= M; m += MR) {
    if (prefetch != nullptr) prefetch->next();
    gemm_block<kInit, MR, NV>(K, {A.data + m * A.row, A.row, A.col}, B, C + m * ldc, ldc, scale);
  }
  if constexpr (MR > 1) {
    if (m < M) gemm_rows<kInit, MR / 2, NV>(m, M, K, A, B, C, ldc, scale, prefetch);
  }
}

/// The largest block of rows whose accumulators, B vectors and broadcast fit the registers.
template <int NV>
constexpr int kBlockRows = kRegisters == 32 ? (NV == 1   ? 16
                                               : NV == 4 ? 6
                                                         : 8)
                                            : (NV == 1 ? 8 : 4);

/// The product over M rows and `vectors` vectors of columns. If `prefetch` is not null, a part is
/// prefetched before each block of C.
template <Init kInit>
HWY_NOINLINE void gemm(int64_t M, int64_t vectors, int64_t K, Scalars A, Vectors B,
                       float* HWY_RESTRICT C, int64_t ldc, const float* HWY_RESTRICT scale,
                       RowPrefetch* prefetch = nullptr) {
  while (vectors > 0) {
    int64_t step = 0;
    if (kRegisters == 32 && vectors % 3 != 0 && vectors >= 4) {
      gemm_rows<kInit, kBlockRows<4>, 4>(0, M, K, A, B, C, ldc, scale, prefetch);
      step = 4;
    } else if (vectors >= 3) {
      gemm_rows<kInit, kBlockRows<3>, 3>(0, M, K, A, B, C, ldc, scale, prefetch);
      step = 3;
    } else if (vectors == 2) {
      gemm_rows<kInit, kBlockRows<2>, 2>(0, M, K, A, B, C, ldc, scale, prefetch);
      step = 2;
    } else {
      gemm_rows<kInit, kBlockRows<1>, 1>(0, M, K, A, B, C, ldc, scale, prefetch);
      step = 1;
    }
    vectors -= step;
    B.data += step * kLanes;
    C += step * kLanes;
    if (kInit == Init::kScaleAdd) scale += step * kLanes;
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
