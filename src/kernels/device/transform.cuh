// What becomes of one score before the softmax: softcap and ALiBi.
#pragma once
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "host_device/softcap.h"

// A score in units of log2: softcap * tanh(scale * s / softcap), ALiBi. Every rounding is spelled out, so that all
// kernels give the same bits: what the compiler makes of a * b + c depends on what is around it.
__device__ __forceinline__ float transform_score(const CallParams& p, float s, float slope, float distance) {
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

// The derivative of softcap * tanh(x), x = scale * s / softcap, by scale * s: 1 - tanh(x)^2 = 4 r (1 - r) with
// r = 1 / (exp(2 x) + 1).
__device__ __forceinline__ float softcap_slope(const CallParams& p, float s) {
  const float r = reciprocal_fast(exp2_fast(s * p.softcap_scale) + 1);
  return 4 * r * (1 - r);
}

__device__ __forceinline__ float alibi_slope(const CallParams& p, int batch, int head) {
  return p.alibi_slopes[batch * p.alibi_batch_stride + head] * 1.4426950408889634f;
}
