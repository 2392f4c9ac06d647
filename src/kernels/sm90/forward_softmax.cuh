// Scores to probabilities, in the registers of a warpgroup. In an m64nN accumulator a thread holds, for each 8 columns, columns 2q and 2q + 1
// (q = lane % 4) of rows r and r + 8 (r = lane / 4): x[4j], x[4j + 1] belong to row r, x[4j + 2], x[4j + 3] to row r + 8.
#pragma once
#include "sm90/forward_schedule.cuh"

// Softmax state of the two rows r and r + 8 a thread shares with its quad.
struct Rows {
  float shift[2];  // -max * c, the exponent's offset: P = exp2(c * S + shift). +inf: no key seen yet
  float sum[2];    // of this thread's columns
};

__device__ __forceinline__ void exponentials(const float (&S)[kBlockKeys / 2], u32 (&P)[kBlockKeys / 4], float c, float shift0, float shift1,
                                             float& sum0, float& sum1) {
  float a0, a1, b0, b1;  // four short sums
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4) {
    const float p0 = exp2_fast(__fmaf_rn(S[i], c, shift0)), p1 = exp2_fast(__fmaf_rn(S[i + 1], c, shift0));
    const float p2 = exp2_fast(__fmaf_rn(S[i + 2], c, shift1)), p3 = exp2_fast(__fmaf_rn(S[i + 3], c, shift1));
    if (i == 0) a0 = p0, a1 = p1, b0 = p2, b1 = p3;
    else a0 += p0, a1 += p1, b0 += p2, b1 += p3;
    P[i / 2] = pack(p0, p1);
    P[i / 2 + 1] = pack(p2, p3);
  }
  sum0 = a0 + a1, sum1 = b0 + b1;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Moves both rows to new maxima. O and the sums were relative to the old ones.
template <bool first>
__device__ __forceinline__ void rescale(float (&O)[kValueDim / 2], Rows& rows, float max0, float max1, float c) {
  const float infinity = __int_as_float(0x7f800000);
  const float old0 = rows.shift[0], old1 = rows.shift[1];
  const float shift0 = fminf(old0, -quad_max(max0) * c), shift1 = fminf(old1, -quad_max(max1) * c);
  rows.shift[0] = shift0, rows.shift[1] = shift1;
  if (first) return;  // O and the sums are still 0
  const float factor0 = shift0 == infinity ? 1 : exp2_fast(shift0 - old0);
  const float factor1 = shift1 == infinity ? 1 : exp2_fast(shift1 - old1);
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i += 4) O[i] *= factor0, O[i + 1] *= factor0, O[i + 2] *= factor1, O[i + 3] *= factor1;
  rows.sum[0] *= factor0, rows.sum[1] *= factor1;
}

// P is exact for any shift, as long as nothing overflows, so the maximum in use may lag behind. No new one is computed until the sum of some row of
// the warp says that P has outgrown kSumLimit. Rows without a key so far (shift = +inf) and non-finite scores always say so.
template <bool first>
__device__ __forceinline__ void softmax_step(const float (&S)[kBlockKeys / 2], u32 (&P)[kBlockKeys / 4], float (&O)[kValueDim / 2], Rows& rows,
                                             float c) {
  const float infinity = __int_as_float(0x7f800000);
  float sum0, sum1;
  if (!first) {
    exponentials(S, P, c, rows.shift[0], rows.shift[1], sum0, sum1);
    const bool settled = sum0 + sum1 <= float(kSumLimit);
    if (!__any_sync(0xffffffff, !settled)) {  // __all_sync(settled) takes more registers
      rows.sum[0] += sum0, rows.sum[1] += sum1;
      return;
    }
  }
  float max0 = S[0], max1 = S[2];
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4) {
    max0 = fmaxf(max0, fmaxf(S[i], S[i + 1]));
    max1 = fmaxf(max1, fmaxf(S[i + 2], S[i + 3]));
  }
  rescale<first>(O, rows, max0, max1, c);
  exponentials(S, P, c, rows.shift[0] == infinity ? 0 : rows.shift[0], rows.shift[1] == infinity ? 0 : rows.shift[1], sum0, sum1);
  rows.sum[0] += sum0, rows.sum[1] += sum1;
}

// A score in units of log2: softcap * tanh(scale * s / softcap), ALiBi.
__device__ __forceinline__ float transform_score(const ForwardParams& p, float s, float slope, float distance) {
  if (kSoftcap) {
    const float e = exp2_fast(fminf(s * p.softcap_scale, 126.f));  // tanh(x) = 1 - 2 / (exp(2x) + 1)
    s = p.softcap_log2 - 2 * p.softcap_log2 * reciprocal_fast(e + 1);
  } else {
    s *= p.scale_log2;
  }
  if (kAlibi) s -= slope * fabsf(distance);
  return s;
}

__device__ __forceinline__ float alibi_slope(const ForwardParams& p, const Place& place) {
  return p.alibi_slopes[place.batch * p.alibi_batch_stride + place.head] * 1.4426950408889634f;
}

__device__ __forceinline__ void transform_scores(const ForwardParams& p, float (&S)[kBlockKeys / 2], u32 view, int diagonal, int key_tile) {
  float slope = 0, distance = 0;
  if (kAlibi) {
    slope = alibi_slope(p, read_place(view));
    distance = float(diagonal + int(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) - key_tile * kBlockKeys - int(threadIdx.x) % 4 * 2);
  }
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) S[i] = transform_score(p, S[i], slope, distance + float((i & 2 ? 8 : 0) - i / 4 * 8 - (i & 1)));
}

// The keys that rows r and r + 8 of this thread may see, [low, high0) and [low + 8, high1), relative to its first column.
struct Visible {
  int low, high0, high1;
};

__device__ __forceinline__ Visible visible_of_thread(const ForwardParams& p, int sk, int diagonal) {
  const int column = threadIdx.x % 4 * 2;
  diagonal += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  Visible visible = {0, sk - column, sk - column};
  if (kHasRight) {
    visible.high0 = min(visible.high0, diagonal + p.window_right + 1 - column);
    visible.high1 = min(visible.high1, diagonal + 8 + p.window_right + 1 - column);
  }
  if (kHasLeft) visible.low = diagonal - p.window_left - column;
  return visible;
}

// All other keys score -inf.
__device__ __forceinline__ void mask_scores(float (&S)[kBlockKeys / 2], const Visible& visible, int key_tile) {
  const int key = key_tile * kBlockKeys, low = visible.low - key, high0 = visible.high0 - key, high1 = visible.high1 - key;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int column = i / 4 * 8 + (i & 1);
    bool seen = column < (i & 2 ? high1 : high0);
    if (kHasLeft) seen = seen && column >= (i & 2 ? low + 8 : low);
    S[i] = seen ? S[i] : -__int_as_float(0x7f800000);
  }
}
