// The online softmax of the wide path. Warps that share rows have the same maxima of these and other keys. Each warp
// stores P of its keys to shared memory for all of them, and keeps its own sums until the end.
#pragma once
#include "attention/softmax.cuh"
#include "decode/scores.cuh"
#include "decode/wide/tile.cuh"

class WideSoftmax {
 public:
  Rows rows[kWarpStrips];  // sums are those of the thread's columns of S

  __device__ __forceinline__ explicit WideSoftmax(const WideWarp& warp) : warp_(warp) {
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) rows[strip] = rows_without_keys();
  }

  // Stores P by the maxima in use. Returns whether some sum of the thread exceeds kSumLimit (attention/softmax.cuh):
  // then all threads of the CTA call move_maxima, else all call settle.
  __device__ __forceinline__ bool store_probabilities(const WideScores& S, float c) {
    bool settled = true;
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
      const float (&shift)[2] = rows[strip].shift;
      settled = store<false>(S[strip], strip, c, shift[0], shift[1]) <= float(kSumLimit) && settled;
    }
    return !settled;
  }
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
      for (int i = 0; i < 2; ++i) rows[strip].sum[i] += sums_[strip][i];
  }

  // Moves the rows of the CTA to new maxima, and stores P again. The warps meet at a barrier in it and at its end.
  __device__ __forceinline__ void move_maxima(const WideScores& S, WideOutput& O, float c) {
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
      float max[2] = {S[strip][0], S[strip][2]};
#pragma unroll
      for (int i = 0; i < kWarpKeys / 2; ++i) max[i / 2 % 2] = fmaxf(max[i / 2 % 2], S[strip][i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[i] = quad_max(max[i]);
        if (threadIdx.x % 4 == 0) *exchanged(warp_.share, strip, i) = max[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float max = *exchanged(0, strip, i);
#pragma unroll
        for (int share = 1; share < kColumnShares; ++share) max = fmaxf(max, *exchanged(share, strip, i));
        const float old = rows[strip].shift[i];
        const float shift = fminf(old, -__fmul_rn(max, c));
        factor[i] = shift == infinity() ? 1 : exp2_fast(shift - old);
        rows[strip].shift[i] = shift;
        rows[strip].sum[i] *= factor[i];
      }
#pragma unroll
      for (int i = 0; i < kShareColumns / 2; ++i) O[strip][i] *= factor[i / 2 % 2];
      const auto finite = [](float shift) { return shift == infinity() ? 0 : shift; };
      store<true>(S[strip], strip, c, finite(rows[strip].shift[0]), finite(rows[strip].shift[1]));
    }
    settle();
    __syncthreads();
  }

  // Sums over all columns of S, by all threads of the CTA.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(rows[strip].sum[i]);
        if (threadIdx.x % 4 == 0) *exchanged(warp_.share, strip, i) = sum;
      }
    __syncthreads();
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = *exchanged(0, strip, i);
#pragma unroll
        for (int share = 1; share < kColumnShares; ++share) sum += *exchanged(share, strip, i);
        rows[strip].sum[i] = sum;
      }
  }

  // Where P of a row of the CTA and of a key of the tile lies, and those of the next key if that is even.
  static __device__ __forceinline__ u32 place(int row, int key) {
    return shared_base() + kLayout.exchange + key / 64 * kPPanelBytes + swizzled(row, key % 64 / 8) + key % 8 * 2;
  }

 private:
  // Numbers of a row that the warps of its rows exchange, one of each.
  __device__ __forceinline__ float* exchanged(int share, int strip, int i) const {
    return reinterpret_cast<float*>(raw + kLayout.stats) + share * kBlockRows + warp_.first_row + strip * kWarpRows +
           int(thread_row()) + 8 * i;
  }

  // Stores P of a strip. Where score_mod hides a key, P is -0 (wide/non_finite.cuh). Returns the sum that kSumLimit
  // bounds.
  template <bool exact>
  __device__ __forceinline__ float store(const float (&S)[kWarpKeys / 2], int strip, float c, float shift0,
                                         float shift1) {
    u32 P[kWarpKeys / 4];
    const float sum = exponentials<exact>(S, P, c, shift0, shift1, sums_[strip][0], sums_[strip][1]);
    const int row = warp_.first_row + strip * kWarpRows + int(thread_row());
#pragma unroll
    for (int i = 0; i < kWarpKeys / 4; ++i) {
      if (kScoreMod) {
        P[i] |= S[2 * i] == -infinity() ? 0x8000 : 0;
        P[i] |= S[2 * i + 1] == -infinity() ? 0x80000000 : 0;
      }
      store_shared(place(row + i % 2 * 8, warp_.first_key() + i / 2 * 8 + int(thread_column())), int(P[i]));
    }
    return sum;
  }

  const WideWarp& warp_;
  float sums_[kWarpStrips][2];  // of the tile
};
