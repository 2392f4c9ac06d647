// Repair of gradients. NaN or infinity in an input reaches gradients even where the mask hides it: P and dS are 0
// there, but 0 * NaN is NaN, and one product sums over 64 rows or keys. The kernels that store gradients report values
// that are not finite. If there are any, each such row of dQ, dK and dV is recomputed from the definition, over the
// rows or keys that it sees, by one warp: this is slow.
#pragma once
#include "attention/dropout.cuh"
#include "attention/fragment_store.cuh"
#include "device/score.cuh"
#include "backward/layout.cuh"

enum : int { kHeadShare = (kHeadDim + 31) / 32, kValueShare = (kValueDim + 31) / 32 };

// Loads and stores the columns of a lane in a row: every 32nd one.
template <class Type, int columns>
__device__ __forceinline__ void load_row(const typename Type::Memory* row, int dims, float (&x)[columns]) {
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    const int column = threadIdx.x % 32 + 32 * i;
    x[i] = column < dims ? Type::to_float(row[column]) : 0;
  }
}
template <class Type, int columns>
__device__ __forceinline__ void store_row(typename Type::Memory* row, int dims, const float (&x)[columns],
                                          float scale) {
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    const int column = threadIdx.x % 32 + 32 * i;
    if (column < dims) row[column] = from_f32<Type::kType>(x[i] * scale);
  }
}
template <class Type, int columns>
__device__ __forceinline__ bool row_is_finite(const typename Type::Memory* row, int dims) {
  float x[columns];
  load_row<Type>(row, dims, x);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < columns; ++i) finite = finite && fabsf(x[i]) < infinity();
  return __all_sync(0xffffffff, finite);
}
template <int columns>
__device__ __forceinline__ float dot(const float (&x)[columns], const float (&y)[columns]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < columns; ++i) sum += x[i] * y[i];
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  return sum;
}
template <int columns>
__device__ __forceinline__ void add(float (&to)[columns], float weight, const float (&x)[columns]) {
#pragma unroll
  for (int i = 0; i < columns; ++i) to[i] += weight * x[i];
}
// Whether all columns of a row are NaN, so that further terms cannot change it.
template <int columns>
__device__ __forceinline__ bool lost(const float (&x)[columns], int dims) {
  bool all = true;
#pragma unroll
  for (int i = 0; i < columns; ++i) all = all && (int(threadIdx.x % 32 + 32 * i) >= dims || x[i] != x[i]);
  return __all_sync(0xffffffff, all);
}

// P and 2^p_log2 dS of one score. `kept`: 1 / (1 - p) for an entry that dropout keeps, 0 for a dropped one; 1 without
// dropout.
struct Weights {
  float p, ds;
};
__device__ __forceinline__ Weights weights_of(const BackwardParams& p, const ScoreContext& at, float s, float dp,
                                              float kept, float shift, float delta) {
  const float probability = exp2_fast(exponent_up_to(p, at, s, bias_of(p, at), shift, p.p_log2));
  const float slope = score_slope(p, at, s);
  // A dropped entry is 0 even where P or dP is NaN.
  const bool dropped = kDropout && kept == 0;
  return {dropped ? 0 : probability * p.p_scale * kept, probability * ((dropped ? 0 : dp * kept) + delta) * slope};
}

__device__ __forceinline__ float kept_of(const BackwardParams& p, const DropoutMask& dropout, int batch, int head,
                                         int row, int key) {
  if (!kDropout) return 1;
  return keeps(p, dropout, batch, head, row, key) ? p.keep_scale : 0;
}

// The index of the statistics of a sequence and q head.
__device__ __forceinline__ long long statistics_of(const BackwardParams& p, const Lengths& n, int batch, int head) {
  return head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
}

// Recomputes a row of dQ that is not finite.
__device__ __forceinline__ void repair_query(const BackwardParams& p, int batch, int head, int row) {
  const Lengths n = lengths_of(p, batch);
  if (row >= n.sq) return;
  ElementQ::Memory* dq = row_of<ElementQ>(p.dq, batch, n.q_start + row, head);
  if (row_is_finite<ElementQ, kHeadShare>(dq, p.d)) return;
  float q[kHeadShare];
  float dout[kValueShare];
  float sum[kHeadShare] = {};
  load_row<ElementQ>(row_of<ElementQ>(p.q, batch, n.q_start + row, head), p.d, q);
  load_row<ElementO>(row_of<ElementO>(p.dout, batch, n.q_start + row, head), p.dv, dout);
  const long long at = statistics_of(p, n, batch, head) + row;
  const ScoreHead of_head = score_head(p, n, batch, head);
  const KeyRange keys = visible_keys(band_of(p), n, row);
  const DropoutMask dropout = kDropout ? dropout_of(p) : DropoutMask{};
#pragma unroll 1
  for (int key = keys.begin; key < keys.end && !lost(sum, p.d); ++key) {
    const ScoreContext place = score_context(of_head, row, diagonal_of(band_of(p), n, row), key);
    if (hides(p, place)) continue;
    float k[kHeadShare];
    float v[kValueShare];
    load_row<ElementK>(row_of<ElementK>(p.k, batch, n.k_start + key, head / p.group), p.d, k);
    load_row<ElementV>(row_of<ElementV>(p.v, batch, n.k_start + key, head / p.group), p.dv, v);
    if (kScoreMod && score_mod_hides(p, place, dot(q, k))) continue;
    const Weights weights = weights_of(p, place, dot(q, k), dot(dout, v),
                                       kept_of(p, dropout, batch, head, row, key), p.shift[at], p.delta[at]);
    add(sum, weights.ds, k);
  }
  store_row<ElementQ>(dq, p.d, sum, p.scale);
}

// Recomputes a row of dK and dV that is not finite.
__device__ __forceinline__ void repair_key(const BackwardParams& p, int batch, int head, int key) {
  const Lengths n = lengths_of(p, batch);
  if (key >= n.sk) return;
  ElementDk::Memory* dk = row_of<ElementDk>(p.dk, batch, n.k_start + key, head);
  ElementDv::Memory* dv = row_of<ElementDv>(p.dv_grad, batch, n.k_start + key, head);
  if (row_is_finite<ElementDk, kHeadShare>(dk, p.d) && row_is_finite<ElementDv, kValueShare>(dv, p.dv)) return;
  float k[kHeadShare];
  float v[kValueShare];
  float sum_k[kHeadShare] = {};
  float sum_v[kValueShare] = {};
  load_row<ElementK>(row_of<ElementK>(p.k, batch, n.k_start + key, head), p.d, k);
  load_row<ElementV>(row_of<ElementV>(p.v, batch, n.k_start + key, head), p.dv, v);
  const Band band = band_of(p);
  const RowTiles rows = row_tiles(band, n, 1, key, 1);
  const DropoutMask dropout = kDropout ? dropout_of(p) : DropoutMask{};
#pragma unroll 1
  for (int row = rows.begin; row < rows.end && !(lost(sum_k, p.d) && lost(sum_v, p.dv)); ++row) {
#pragma unroll 1
    for (int g = head * p.group; g < (head + 1) * p.group; ++g) {
      const ScoreContext place = score_context(score_head(p, n, batch, g), row, diagonal_of(band_of(p), n, row), key);
      if (hides(p, place)) continue;
      float q[kHeadShare];
      float dout[kValueShare];
      load_row<ElementQ>(row_of<ElementQ>(p.q, batch, n.q_start + row, g), p.d, q);
      load_row<ElementO>(row_of<ElementO>(p.dout, batch, n.q_start + row, g), p.dv, dout);
      if (kScoreMod && score_mod_hides(p, place, dot(q, k))) continue;
      const long long at = statistics_of(p, n, batch, g) + row;
      const Weights weights = weights_of(p, place, dot(q, k), dot(dout, v), kept_of(p, dropout, batch, g, row, key),
                                         p.shift[at], p.delta[at]);
      add(sum_k, weights.ds, q);
      add(sum_v, weights.p, dout);
    }
  }
  store_row<ElementDk>(dk, p.d, sum_k, p.scale);
  store_row<ElementDv>(dv, p.dv, sum_v, 1);
}

// Repairs rows of dK and dV: those of warp `warp`, if `warps` warps divide all rows.
__device__ __forceinline__ void repair_keys(const BackwardParams& p, int warp, int warps) {
  const int hk = p.hq / p.group;
  const long long keys = (long long)(p.batch) * hk * p.sk;
  for (long long i = warp; i < keys; i += warps) repair_key(p, int(i / p.sk / hk), int(i / p.sk % hk), int(i % p.sk));
}

// In the last of `blocks` CTAs to finish, clears the report of values that are not finite for the next launch.
__device__ __forceinline__ void forget_not_finite(const BackwardParams& p, u32 blocks) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), blocks - 1) == blocks - 1)
    *p.not_finite = 0;
}
