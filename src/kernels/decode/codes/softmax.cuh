// Online softmax of transposed scores (FlashAttention-2, algorithm 1, lines 8 to 10), whose P is multiplied with scales
// of V before it is rounded to f16. So that these products stay in the range of f16, P is relative to the max over keys
// of c * S + e, where e is the exponent of the max scale of the key (Rows::shift is minus that max).
#pragma once
#include "attention/softmax.cuh"
#include "decode/codes/scales.cuh"
#include "decode/codes/steps.cuh"

// Groups of columns of V whose products need a correction: for the bias of integer codes, or for zero points.
enum : int { kOffsets = CodesOfV::kBias > 0 || kVZeroPoint ? int(CodeSteps<kOfV>::kGroups) : 0 };

// The softmax state of a thread's rows, two in each of eight.
struct SoftmaxRows {
  Rows tiles[kRowTiles];
  // The correction of each group: the sum of P times the bias of V's codes, and times their zero points. It is
  // subtracted from O at the end of a work tile. The accumulators are those of a product: of eight equal rows with the
  // bias, and of eight equal rows with zero points.
  float offsets[kOffsets > 0 ? kOffsets : 1][kRowTiles][4];
};

// Reduces a row over the eight lanes that share it.
__device__ __forceinline__ float max_of_row(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}
__device__ __forceinline__ float sum_of_row(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// P = exp2(c * S + shift), each row with its own shift, and the sums of this thread's keys. `exact`: as in
// attention/softmax.cuh.
template <bool exact>
__device__ __forceinline__ void exponentials(float (&P)[kScores], const float (&S)[kScores], float c,
                                             const float (&shift)[2], float (&sum)[2]) {
  float other_sum[2];  // two sums of a row, so that additions wait less for each other
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const float row_shift = shift[i % 2];
    P[i] = exp2_fast(exact ? __fadd_rn(__fmul_rn(S[i], c), row_shift) : __fmaf_rn(S[i], c, row_shift));
    float& to = i / 2 % 2 == 0 ? sum[i % 2] : other_sum[i % 2];
    to = i < 4 ? P[i] : to + P[i];
  }
  sum[0] += other_sum[0];
  sum[1] += other_sum[1];
}

// A step of the softmax, as in attention/softmax.cuh: a row keeps its shift until the sum of P in some row of the warp,
// times the max scale of the tile, exceeds kSumLimit.
__device__ __forceinline__ void softmax_step(float (&P)[kRowTiles][kScores], const float (&S)[kRowTiles][kScores],
                                             float (&O)[kRowTiles][kOutputs], SoftmaxRows& rows, float c, u32 scales) {
  const float max_scale = max_v_scale_of_tile(scales);
  float sum[kRowTiles][2];
  bool settled = true;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    exponentials<false>(P[i], S[i], c, rows.tiles[i].shift, sum[i]);
    settled = settled && (sum[i][0] + sum[i][1]) * max_scale <= float(kSumLimit);
  }
  if (__any_sync(0xffffffff, !settled)) {
    float exponent[kVScales > 0 ? kKeyMatrices : 1];  // of the max scale of this thread's keys
#pragma unroll
    for (int i = 0; kVScales > 0 && i < kKeyMatrices; ++i)
      exponent[i] = float(__float_as_int(max_v_scale_of_key(scales, 8 * i + int(thread_row()))) >> 23) - 127;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float shift[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float row_max = -infinity();
#pragma unroll
        for (int j = row; j < kScores; j += 2)
          row_max = fmaxf(row_max, kVScales > 0 ? __fadd_rn(__fmul_rn(S[i][j], c), exponent[j / 2]) : S[i][j]);
        row_max = max_of_row(row_max);
        float& row_shift = rows.tiles[i].shift[row];
        const float old = row_shift;
        row_shift = fminf(old, -(kVScales > 0 ? row_max : __fmul_rn(row_max, c)));
        const float factor = row_shift == infinity() ? 1 : exp2_fast(row_shift - old);
#pragma unroll
        for (int j = row; j < kOutputs; j += 2) O[i][j] *= factor;
#pragma unroll
        for (int j = row; j < 4 * kOffsets; j += 2) rows.offsets[j / 4][i][j % 4] *= factor;
        rows.tiles[i].sum[row] *= factor;
        shift[row] = row_shift == infinity() ? 0 : row_shift;
      }
      exponentials<true>(P[i], S[i], c, shift, sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) rows.tiles[i / 2].sum[i % 2] += sum[i / 2][i % 2];
}
