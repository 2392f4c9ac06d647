// The score hook: the one place where a score is transformed between the product and the softmax, and where its
// derivative is. Forward, decode and backward kernels and the repairs of rows call score() or exponent() with the place
// of the entry; softcap and ALiBi are the two bodies there are. Every rounding is spelled out, so that all kernels give
// the same bits: what the compiler makes of a * b + c depends on what is around it.
#pragma once
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "host_device/score.h"

enum : int {
  kScoreReadsHead = kAlibi,    // score() reads what score_head() has
  kHasScoreSlope = kSoftcap,   // score_slope() is not 1 everywhere
};

__device__ __forceinline__ ScoreHead score_head(const CallParams& p, int batch, int head) {
  if (!kScoreReadsHead) return {0};
  return {__float_as_int(p.alibi_slopes[batch * p.alibi_batch_stride + head] * 1.4426950408889634f)};
}

// The place of an entry of S. Kernels make that of a thread's first one, and move it by constants to the others: what
// no body reads is not computed.
struct ScoreContext {
  ScoreHead head;
  int query, key;  // in their sequence
  float distance;  // of the query's diagonal from the key

  __device__ __forceinline__ ScoreContext moved(int queries, int keys) const {
    return {head, query + queries, key + keys, distance + float(queries - keys)};
  }
};

__device__ __forceinline__ ScoreContext score_context(const ScoreHead& head, int query, int diagonal, int key) {
  return {head, query, key, float(diagonal - key)};
}

// softcap * tanh(x), x = scale * s / softcap, in units of log2.
__device__ __forceinline__ float softcap_score(const CallParams& p, float s) {
  const float u = __fmul_rn(s, p.softcap_scale);
  const float large = __fmaf_rn(-2 * p.softcap_log2, reciprocal_fast(__fadd_rn(exp2_fast(u), 1)), p.softcap_log2);
  const float from_center = __fmaf_rn(u, u, -float(kTanhCenter));
  const float polynomial = __fmaf_rn(from_center, from_center, float(kTanhRest));
  const float small = __fmul_rn(__fmul_rn(s, p.softcap_small), polynomial);
  return from_center < float(kTanhSmall * kTanhSmall - kTanhCenter) ? small : large;  // |u| < kTanhSmall
}

// Its derivative by scale * s: 1 - tanh(x)^2 = 4 r (1 - r) with r = 1 / (exp(2 x) + 1).
__device__ __forceinline__ float softcap_slope(const CallParams& p, float s) {
  const float r = reciprocal_fast(exp2_fast(s * p.softcap_scale) + 1);
  return 4 * r * (1 - r);
}

// s - slope * |distance|, whose derivative by s is 1.
__device__ __forceinline__ float alibi_score(const ScoreContext& at, float s) {
  return __fmaf_rn(-__int_as_float(at.head.alibi), fabsf(at.distance), s);
}

// What a product s of q and k becomes. kScoreMode 0: it stays, and exponents take the scale. 1: a score in units of
// log2.
__device__ __forceinline__ float score(const CallParams& p, const ScoreContext& at, float s) {
  if (kScoreMode == 0) return s;
  s = kSoftcap ? softcap_score(p, s) : __fmul_rn(s, p.scale_log2);
  return kAlibi ? alibi_score(at, s) : s;
}

// The derivative of a score by scale * s.
__device__ __forceinline__ float score_slope(const CallParams& p, const ScoreContext&, float s) {
  return kSoftcap ? softcap_slope(p, s) : 1;
}

// What turns a score into units of log2.
__device__ __forceinline__ float score_factor(const CallParams& p) { return kScoreMode == 0 ? p.scale_log2 : 1.f; }

// The score of a product in units of log2, and `shift`: the exponent of an entry of P.
__device__ __forceinline__ float exponent(const CallParams& p, const ScoreContext& at, float s, float shift) {
  return kScoreMode == 0 ? __fmaf_rn(s, p.scale_log2, shift) : __fadd_rn(score(p, at, s), shift);
}
