// Factors of codes on the warpgroup path: of keys, which the converting warps leave (converter.cuh), and of rows of Q;
// the rows of Q as f16, and the softmax whose P is multiplied with factors of V.
#pragma once
#include "attention/softmax.cuh"
#include "decode/codes/queries.cuh"
#include "decode/loads/warpgroup_loads.cuh"

// Makes f16 of `rows` rows of Q in shared memory from row `first` on, each divided by the power of 2 that makes its max
// 2^14 or more. That, times the descale of the row, goes to kLayout.q_factors. `warp` is one of `warps`.
__device__ __forceinline__ void convert_queries(const DecodeParams& p, const WorkTile& tile, int first, int rows,
                                                int warp, int warps) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int row = first + warp; row < first + rows; row += warps) {
    float descale = 1;
    if constexpr (kCodesQ) {
      const TileRows in_tile = rows_of_tile(p, tile);
      if (row < in_tile.count) descale = query_descale(p, tile, in_tile.first + row);
    }
    const u32 at = shared_base() + query_place(row * kQueryChunks + min(lane, kQueryChunks - 1));
    u32 x[4], row_max = 0;
    load_shared16(at, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) row_max = max(row_max, max(x[i] & 0x7fff, x[i] >> 16 & 0x7fff));
    const RowExponent exponent(__reduce_max_sync(0xffffffff, row_max));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = Half::pack(QueryNumber::low(x[i]) * exponent.inverse, QueryNumber::high(x[i]) * exponent.inverse);
    __syncwarp();
    if (lane < kQueryChunks) store_shared16(at, x);
    if (lane == 0) reinterpret_cast<float*>(raw + kLayout.q_factors)[row] = exponent.factor * descale;
  }
}

// Q of the work tiles that have keys, one after another, which the warpgroups themselves load and convert: two that
// share a warp group have rows of their own.
class ConvertedQueries {
 public:
  __device__ __forceinline__ ConvertedQueries(const DecodeParams& p, const WorkTile& first, bool more)
      : is_there_(more && first.has_keys()) {
    if (is_there_) copy(p, first);
    async_copy_commit();
    // The warps that load wait for this, as Q would arrive late after requests of K and V.
    named_barrier_arrive(kFirstQuery, kCtaThreads);
  }
  __device__ __forceinline__ void begin_work_tile(const DecodeParams& p, const WorkTile& tile) {
    if (!is_there_) {
      sync();  // no warp reads the Q before any more
      copy(p, tile);
      async_copy_commit();
    }
    is_there_ = false;
    async_copy_wait<0>();
    sync();
    convert_queries(p, tile, first_row(), kRows, threadIdx.x % kThreads / 32, kThreads / 32);
    fence_async_proxy();
    sync();
  }
  __device__ __forceinline__ void release() const {}

 private:
  enum : int {
    kRows = 64,
    kOwnRows = kBlockRows > kRows,  // of each warpgroup
    kThreads = kOwnRows ? 128 : int(kComputeThreads),
  };
  static __device__ __forceinline__ int warpgroup() { return kOwnRows ? uniform(threadIdx.x / 128) : 0; }
  static __device__ __forceinline__ int first_row() { return kRows * warpgroup(); }
  static __device__ __forceinline__ void copy(const DecodeParams& p, const WorkTile& tile) {
    copy_query<kThreads, kRows>(p, tile, threadIdx.x % kThreads, first_row());
  }
  static __device__ __forceinline__ void sync() {
    if (kOwnRows)
      named_barrier_sync(kTileBarrier + 1 + warpgroup(), kThreads);
    else
      sync_compute_warps();
  }

  bool is_there_;
};

// What multiplies the scores of a thread's two rows, besides the factors of keys.
struct RowFactors {
  float factor[2];

  __device__ __forceinline__ RowFactors(const DecodeParams& p, const WorkTile& tile, int warp_in_group) {
    const float of_sequence = kKScales == 0 ? nan_unless_finite(scale_of_sequence(p.k_scale, tile)) : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp_in_group * kWarpRows + int(thread_row()) + 8 * i;
      factor[i] = of_sequence;
      if (tile.has_keys()) factor[i] *= reinterpret_cast<const float*>(raw + kLayout.q_factors)[row];
    }
  }
  // S is multiplied with the factors of K at `keys`.
  __device__ __forceinline__ void multiply_keys(float (&S)[kBlockKeys / 2], u32 keys) const {
    if constexpr (kKScales == 0) return;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
      float of_key[2];
      load_shared_pair(keys + 8 * i + 4 * thread_column(), of_key[0], of_key[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) S[i + j] *= of_key[j % 2];
    }
  }
  // S, whose rows take turns by two columns, or a number of each row.
  template <int count>
  __device__ __forceinline__ void multiply_rows(float (&x)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] *= factor[count == 2 ? i : i / 2 % 2];
  }
};

// P = exp2(c * S + shift) as words, times the factors of V at `keys`, and the sums without these. Returns the sum that
// kSumLimit bounds.
template <bool exact>
__device__ __forceinline__ float scaled_exponentials(const float (&S)[kBlockKeys / 2], u32 (&P)[kPWords],
                                                     const float (&c)[2], const float (&shift)[2], u32 keys,
                                                     float (&sum)[2]) {
  float max_factor = 0;
  sum[0] = sum[1] = 0;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4) {
    float factor[2], x[4];
    load_shared_pair(keys + 8 * i + 4 * thread_column(), factor[0], factor[1]);
    max_factor = fmaxf(max_factor, fmaxf(fabsf(factor[0]), fabsf(factor[1])));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float s = S[i + j], at = shift[j / 2];
      x[j] = exp2_fast(exact ? __fadd_rn(__fmul_rn(s, c[j / 2]), at) : __fmaf_rn(s, c[j / 2], at));
      sum[j / 2] += x[j];
    }
    P[i / 2] = ElementP::pack(x[0] * factor[0], x[1] * factor[1]);
    P[i / 2 + 1] = ElementP::pack(x[2] * factor[0], x[3] * factor[1]);
  }
  return (sum[0] + sum[1]) * max_factor;
}

// A step of the softmax, as in attention/softmax.cuh, with P relative to the max over keys of c * S plus the exponent
// of the key's factor, so that these products stay in the range of f16 (decode/codes/softmax.cuh).
__device__ __forceinline__ void scaled_softmax_step(const float (&S)[kBlockKeys / 2], u32 (&P)[kPWords],
                                                    float (&O)[kValueDim / 2], Rows& rows, const float (&c)[2],
                                                    u32 keys) {
  float sum[2];
  const bool settled = scaled_exponentials<false>(S, P, c, rows.shift, keys, sum) <= float(kSumLimit);
  if (__any_sync(0xffffffff, !settled)) {
    float row_max[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
      float factor[2];
      load_shared_pair(keys + 8 * i + 4 * thread_column(), factor[0], factor[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float exponent =
            float(__float_as_int(within_exponents_of_p(fabsf(factor[j % 2]))) >> 23) - 127;
        row_max[j / 2] = fmaxf(row_max[j / 2], __fadd_rn(__fmul_rn(S[i + j], c[j / 2]), exponent));
      }
    }
    rescale<false>(O, rows, row_max[0], row_max[1], 1);
    const float shift[2] = {rows.shift[0] == infinity() ? 0 : rows.shift[0],
                            rows.shift[1] == infinity() ? 0 : rows.shift[1]};
    scaled_exponentials<true>(S, P, c, shift, keys, sum);
  }
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
}
