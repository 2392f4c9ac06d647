// What happens to scores between the product and the softmax: transform_scores changes them, mask_scores hides keys.
#pragma once
#include "shared/fragment.cuh"
#include "shared/math.cuh"
#include "shared/schedule.cuh"
#include "shared/softcap.h"

// A score in units of log2: softcap * tanh(scale * s / softcap), ALiBi. Every rounding is spelled out, so that all
// kernels give the same bits: what the compiler makes of a * b + c depends on what is around it.
__device__ __forceinline__ float transform_score(const AttentionParams& p, float s, float slope, float distance) {
  if (kSoftcap) {
    const float u = __fmul_rn(s, p.softcap_scale);
    const float large = __fmaf_rn(-2 * p.softcap_log2, reciprocal_fast(__fadd_rn(exp2_fast(u), 1)), p.softcap_log2);
    const float from_center = __fmaf_rn(u, u, -float(kTanhCenter));
    const float polynomial = __fmaf_rn(from_center, from_center, float(kTanhRest));
    const float small = __fmul_rn(__fmul_rn(s, p.softcap_small), polynomial);
    s = from_center < float(kTanhSmall * kTanhSmall - kTanhCenter) ? small : large;  // |u| < kTanhSmall
  } else {
    s = __fmul_rn(s, p.scale_log2);
  }
  if (kAlibi) s = __fmaf_rn(-slope, fabsf(distance), s);
  return s;
}

__device__ __forceinline__ float alibi_slope(const AttentionParams& p, const Place& place) {
  return p.alibi_slopes[place.batch * p.alibi_batch_stride + place.head] * 1.4426950408889634f;
}

// All scores of a strip at `view` for a key tile.
__device__ __forceinline__ void transform_scores(const AttentionParams& p, float (&S)[kBlockKeys / 2], u32 view,
                                                 int diagonal, int key_tile) {
  float slope = 0;
  float distance = 0;
  if (kAlibi) {
    slope = alibi_slope(p, load_place(view));
    distance = float(diagonal + int(warp_row() + thread_row()) - key_tile * kBlockKeys - int(thread_column()));
  }
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i)
    S[i] = transform_score(p, S[i], slope, distance + float((i & 2 ? 8 : 0) - i / 4 * 8 - (i & 1)));
}

// The keys that rows r and r + 8 of this thread may see, [low, high0) and [low + 8, high1), relative to its first
// column.
struct Visible {
  int low, high0, high1;
};

__device__ __forceinline__ Visible visible_of_thread(const AttentionParams& p, int sk, int diagonal) {
  const int column = thread_column();
  diagonal += warp_row() + thread_row();
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
  const int key = key_tile * kBlockKeys;
  const int low = visible.low - key;
  const int high0 = visible.high0 - key;
  const int high1 = visible.high1 - key;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int column = i / 4 * 8 + (i & 1);
    bool seen = column < (i & 2 ? high1 : high0);
    if (kHasLeft) seen = seen && column >= (i & 2 ? low + 8 : low);
    S[i] = seen ? S[i] : -infinity();
  }
}
