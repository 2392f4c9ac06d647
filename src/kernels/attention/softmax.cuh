// Online softmax (FlashAttention-2, algorithm 1, lines 8 to 10) on the fragments of a warpgroup: scores to
// probabilities, in registers.
#pragma once
#include "attention/fragment.cuh"
#include "device/math.cuh"
#include "device/operands.cuh"

using ElementP = ElementV;  // of P, which is multiplied with V

enum : int {
  kPWords = kBlockKeys * ElementP::kBytes / 8,  // of a thread's P
  // The maximum moves when the sum of a thread's columns of a row of P exceeds this. No number of f16 exceeds 65504. No
  // number of e4m3 exceeds 448; there the sum is that of a fourth of these columns, and bounds each of them.
  kSumLimit = ElementP::kType == kE4M3 ? 448 : ElementP::kType == kF16 ? 1 << 12 : 1 << 24,
  // P is 2 to this at the maximum: e4m3 has few numbers below 1, and a sum of equal ones does not exceed its limit.
  kTopExponent = ElementP::kType != kE4M3 ? 0 : kBlockKeys > 112 ? 4 : 5,
};

// Softmax state of the two rows r and r + 8 that a thread shares with its quad.
struct Rows {
  float shift[2];  // kTopExponent - max * c, the exponent's offset: P = exp2(c * S + shift). +inf: no key seen yet
  float sum[2];    // of this thread's columns
};

__device__ __forceinline__ Rows rows_without_keys() { return {{infinity(), infinity()}, {0, 0}}; }

// With products of 8 bits the softmax binds, and the sums of a tile are those of the rounded P, two numbers an
// instruction. A thread adds so few numbers of a row that sums of f16 are as exact as P.
enum : int { kSumsWords = ElementQ::kType == kE4M3 && ElementP::kType != kE4M3 };

// Sums of the two rows of a tile's P.
__device__ __forceinline__ void sum_words(const u32 (&P)[kPWords], float& sum0, float& sum1) {
  u32 a[4];
#pragma unroll
  for (int i = 0; i < kPWords; ++i) a[i % 4] = i < 4 ? P[i] : ElementP::add(a[i % 4], P[i]);
  const u32 row0 = ElementP::add(a[0], a[2]), row1 = ElementP::add(a[1], a[3]);
  sum0 = ElementP::low(row0) + ElementP::high(row0);
  sum1 = ElementP::low(row1) + ElementP::high(row1);
}

// What waits for nothing.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// P = exp2(c * S + shift), and its sums. `exact`: P is 1 at the maximum, however large that is, since c * S is rounded
// as it was for the shift. Otherwise it takes an instruction less, and its error for scores beyond 2^24 shows in the
// sums. Returns the sum that kSumLimit bounds. With `ahead` products may read P until `wait_for_p` returns, which is
// called once the exponentials of so many scores are there; P is not written where these alone exceed the limit.
template <bool exact, int ahead = 0, int scores, int words, class WaitForP = Nothing>
__device__ __forceinline__ float exponentials(const float (&S)[scores], u32 (&P)[words], float c, float shift0,
                                             float shift1, float& sum0, float& sum1, const WaitForP& wait_for_p = {}) {
  float x[scores], sums[4];  // four short sums
  const auto compute_four = [&](int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float shift = j < 2 ? shift0 : shift1;
      x[i + j] = exp2_fast(exact ? __fadd_rn(__fmul_rn(S[i + j], c), shift) : __fmaf_rn(S[i + j], c, shift));
    }
#pragma unroll
    for (int j = 0; !kSumsWords && j < 4; ++j) sums[j] = i == 0 ? x[j] : sums[j] + x[i + j];
  };
  static_assert(ahead == 0 || !kSumsWords);
  if constexpr (ahead > 0) {
#pragma unroll
    for (int i = 0; i < ahead; i += 4) compute_four(i);
    // The branch has the compiler compute them before it waits.
    const bool exceeds = !(sums[0] + sums[1] + (sums[2] + sums[3]) <= float(kSumLimit));
    if (__any_sync(0xffffffff, exceeds)) {
      wait_for_p();
      return infinity();
    }
    wait_for_p();
  }
#pragma unroll
  for (int i = 0; i < scores; i += 4) {
    if (i >= ahead) compute_four(i);
    const float* const p = x + i;
    if constexpr (ElementP::kType == kF32) {
      P[i] = __float_as_uint(p[0]), P[i + 1] = __float_as_uint(p[2]);  // as pack_words
      P[i + 2] = __float_as_uint(p[1]), P[i + 3] = __float_as_uint(p[3]);
    } else if constexpr (ElementP::kType != kE4M3) {
      P[i / 2] = ElementP::pack(p[0], p[1]);
      P[i / 2 + 1] = ElementP::pack(p[2], p[3]);
    } else if (i % 8 > 0) {  // a word of 16 keys holds two of each 8
      P[i / 4 - 1] = pack_e4m3(p[-4], p[-3], p[0], p[1]);
      P[i / 4] = pack_e4m3(p[-2], p[-1], p[2], p[3]);
    }
  }
  if constexpr (kSumsWords) {
    sum_words(P, sum0, sum1);
  } else {
    sum0 = sums[0] + sums[1];
    sum1 = sums[2] + sums[3];
  }
  if constexpr (ElementP::kType == kE4M3)
    return max_or_nan(max_or_nan(sums[0], sums[1]), max_or_nan(sums[2], sums[3]));
  return sum0 + sum1;
}

__device__ __forceinline__ float shift_of(float max, float c) {
  const float at_max = __fmul_rn(quad_max(max), c);
  return kTopExponent == 0 ? -at_max : kTopExponent - at_max;
}

// Moves both rows to new maxima. O and the sums were relative to the old ones.
template <bool first, int count>
__device__ __forceinline__ void rescale(float (&O)[count], Rows& rows, float max0, float max1, float c) {
  const float old0 = rows.shift[0];
  const float old1 = rows.shift[1];
  const float shift0 = fminf(old0, shift_of(max0, c));
  const float shift1 = fminf(old1, shift_of(max1, c));
  rows.shift[0] = shift0;
  rows.shift[1] = shift1;
  if (first) return;  // O and the sums are still 0
  const float factor0 = shift0 == infinity() ? 1 : exp2_fast(shift0 - old0);
  const float factor1 = shift1 == infinity() ? 1 : exp2_fast(shift1 - old1);
#pragma unroll
  for (int i = 0; i < count; ++i) O[i] *= i & 2 ? factor1 : factor0;
  rows.sum[0] *= factor0;
  rows.sum[1] *= factor1;
}

// P is exact for any shift, as long as nothing overflows, so the maximum in use may be an older one. No new one is
// computed until the sum of some row of the warp exceeds kSumLimit. Those of rows without a key so far (shift = +inf)
// and of non-finite scores always do. `wait_for_o` waits for products that add to O, before O is rescaled; with `ahead`
// these read P as well, and are waited for before P is written (`exponentials`).
template <bool first, int ahead = 0, int count, class WaitForO>
__device__ __forceinline__ void softmax_step(const float (&S)[kBlockKeys / 2], u32 (&P)[kPWords], float (&O)[count],
                                             Rows& rows, float c, const WaitForO& wait_for_o) {
  float sum0, sum1;
  if (!first) {
    const auto wait_for_p = [&] {
      if (ahead > 0) wait_for_o();
    };
    const bool settled = exponentials<false, ahead>(S, P, c, rows.shift[0], rows.shift[1], sum0, sum1, wait_for_p) <=
                         float(kSumLimit);
    if (!__any_sync(0xffffffff, !settled)) {  // __all_sync(settled) takes more registers
      rows.sum[0] += sum0;
      rows.sum[1] += sum1;
      return;
    }
  }
  if (ahead == 0) wait_for_o();
  float max0 = S[0];
  float max1 = S[2];
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4) {
    max0 = fmaxf(max0, fmaxf(S[i], S[i + 1]));
    max1 = fmaxf(max1, fmaxf(S[i + 2], S[i + 3]));
  }
  rescale<first>(O, rows, max0, max1, c);
  const float shift0 = rows.shift[0] == infinity() ? 0 : rows.shift[0];
  const float shift1 = rows.shift[1] == infinity() ? 0 : rows.shift[1];
  exponentials<true>(S, P, c, shift0, shift1, sum0, sum1);
  rows.sum[0] += sum0;
  rows.sum[1] += sum1;
}

// The same where no product is adding to O.
template <bool first, int count>
__device__ __forceinline__ void softmax_step(const float (&S)[kBlockKeys / 2], u32 (&P)[kPWords], float (&O)[count],
                                             Rows& rows, float c) {
  softmax_step<first>(S, P, O, rows, c, Nothing{});
}

// The factor of a row of O at the end: 1 / sum, or 0 for a row without keys.
__device__ __forceinline__ float normalizer(float sum) { return sum == 0 ? 0 : reciprocal_fast(sum); }

// A row without keys has sum 0 and gets log(0) = -inf.
__device__ __forceinline__ float lse_of(float sum, float shift) {
  return sum == 0 ? -infinity() : (log2_fast(sum) - shift) * 0.693147180559945f;
}
