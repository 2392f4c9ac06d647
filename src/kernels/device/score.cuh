// The score hook: the only place where a score is transformed between the product and the softmax, and where its
// derivative is computed. Forward, decode and backward kernels and the repairs of rows call score() or exponent() with
// the place of the entry. Its transformations are softcap, ALiBi, expressions and a dense bias. Every rounding is
// explicit, so that all kernels compute the same bits: whether the compiler fuses a * b + c depends on the code around
// it.
#pragma once
#include "device/elements.cuh"
#include "device/expression.cuh"
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "host_device/score.h"

enum : int {
  kScoreReadsHead = kAlibi || kExpressions,     // score() needs score_head()
  kHasScoreSlope = kSoftcap || kScoreModSlope,  // score_slope() is not 1 everywhere
};

using BiasElement = InMemory<kBias ? Element(kBias - 1) : kF32>::Type;

// What the hook loads once for all scores of a q head of a sequence.
struct PlainHead {
  float alibi;              // the slope, in units of log2, kAlibi
  const BiasElement* bias;  // at the first query and key, kBias
};
struct ExpressionHead : PlainHead {
  int batch, head;
  Lengths n;
};
template <bool expressions>
struct ScoreHeadOf {
  using Type = PlainHead;
};
template <>
struct ScoreHeadOf<true> {
  using Type = ExpressionHead;
};
using ScoreHead = ScoreHeadOf<kExpressions != 0>::Type;

__device__ __forceinline__ void set_place(PlainHead&, Lengths, int, int) {}
__device__ __forceinline__ void set_place(ExpressionHead& of, Lengths n, int batch, int head) {
  of.batch = batch;
  of.head = head;
  of.n = n;
}

__device__ __forceinline__ ScoreHead score_head(const CallParams& p, Lengths n, int batch, int head) {
  ScoreHead of_head = {};
  set_place(of_head, n, batch, head);
  if (kAlibi) of_head.alibi = p.alibi_slopes[batch * p.alibi_batch_stride + head] * 1.4426950408889634f;
  if (kBias)
    of_head.bias = static_cast<const BiasElement*>(p.bias.data) + batch * p.bias.batch + head * p.bias.head;
  return of_head;
}

// A head of which only the ALiBi slope is set.
__device__ __forceinline__ ScoreHead head_of_slope(float alibi) {
  ScoreHead of_head = {};
  of_head.alibi = alibi;
  return of_head;
}

// The place of an entry of S. Kernels compute that of a thread's first entry and move it by constants to the others.
// The compiler removes members that no transformation reads.
struct ScoreContext {
  ScoreHead head;
  int query, key;  // in their sequence
  float distance;  // from the key to the query's diagonal
  float apart;     // key - query

  __device__ __forceinline__ ScoreContext moved(int queries, int keys) const {
    return {head, query + queries, key + keys, distance + float(queries - keys), apart + float(keys - queries)};
  }
};

__device__ __forceinline__ ScoreContext score_context(const ScoreHead& head, int query, int diagonal, int key) {
  return {head, query, key, float(diagonal - key), float(key - query)};
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

// The derivative of softcap by scale * s: 1 - tanh(x)^2 = 4 r (1 - r) with r = 1 / (exp(2 x) + 1).
__device__ __forceinline__ float softcap_slope(const CallParams& p, float s) {
  const float r = reciprocal_fast(exp2_fast(s * p.softcap_scale) + 1);
  return 4 * r * (1 - r);
}

// s - slope * |distance|, whose derivative by s is 1.
__device__ __forceinline__ float alibi_score(const ScoreContext& at, float s) {
  return __fmaf_rn(-at.head.alibi, fabsf(at.distance), s);
}

// The dense bias of an entry, from memory. For entries of products after the last row or key it is that of the last
// one.
__device__ __forceinline__ float bias_up_to(const CallParams& p, const ScoreContext& at, int last_query) {
  if (!kBias) return 0;
  const BiasElement bias = at.head.bias[min(at.query, last_query) * p.bias.row + min(at.key, p.sk - 1) * p.bias.key];
  if constexpr (kBias == 1 + kBool) return bias ? 0 : -infinity();
  else return to_f32<Element(kBias ? kBias - 1 : kF32)>(bias);
}
__device__ __forceinline__ float bias_of(const CallParams& p, const ScoreContext& at) {
  return bias_up_to(p, at, p.sq - 1);
}

// The place of an entry. For entries of products after the last row or key it is that of the last one.
template <class Params, class Context>
__device__ __forceinline__ ExpressionPlace expression_place(const Params& p, const Context& at) {
  const auto& of = at.head;
  ExpressionPlace place =
      expression_place(p, of.n, of.batch, of.head, min(at.query, of.n.sq - 1), min(at.key, of.n.sk - 1));
  // Moved by constants, as otherwise an integer is converted for each entry; exact below 2^24.
  place.apart = at.apart;
  if constexpr (kPart != 0) place.apart += float(p.part.key - p.part.query);
  place.delta = kPart || kTopLeft ? place.apart - float(place.sk - place.sq) : -at.distance;
  return place;
}

template <class Params>
__device__ __forceinline__ bool mask_mod_hides(const Params& p, const ScoreContext& at) {
  if constexpr (kMaskMod != 0) return !expression_mask(expression_place(p, at));
  else return false;
}

// Whether the bias or mask_mod hides a key from a query.
template <class Params>
__device__ __forceinline__ bool hides(const Params& p, const ScoreContext& at) {
  return mask_mod_hides(p, at) || (kBias && bias_of(p, at) < float(kHidingBias));
}

// The score of a product after softcap and ALiBi, in units of log2.
__device__ __forceinline__ float capped_score(const CallParams& p, const ScoreContext& at, float s) {
  s = kSoftcap ? softcap_score(p, s) : __fmul_rn(s, p.scale_log2);
  return kAlibi ? alibi_score(at, s) : s;
}

// The argument of score_mod: the score of a product in natural units.
__device__ __forceinline__ float natural_score(const CallParams& p, const ScoreContext& at, float s) {
  constexpr float kLn2 = 0.693147180559945f;
  if (kSoftcap || kAlibi) return __fmul_rn(capped_score(p, at, s), kLn2);
  return __fmul_rn(s, __fmul_rn(p.scale_log2, kLn2));
}

// The score of a product after softcap, ALiBi and score_mod: in units of log2, with score_mod in natural units.
template <class Params>
__device__ __forceinline__ float modified_score(const Params& p, const ScoreContext& at, float s) {
  if constexpr (kScoreMod != 0) return expression_score(expression_place(p, at), natural_score(p, at, s));
  else return capped_score(p, at, s);
}

// The factor of a score to units of log2.
__device__ __forceinline__ float score_factor(const CallParams& p) {
  return kScoreMode == 0 ? p.scale_log2 : kScoreMod ? 1.4426950408889634f : 1.f;
}

// s + bias, whose derivative by s is 1, in the units of s. `hides`: with a bias that hides the result is -inf for any
// s; otherwise it is -inf, a number whose exponential is 0, or NaN.
template <bool hides = true>
__device__ __forceinline__ float biased_score(const CallParams& p, float s, float bias) {
  if (kBias == 1 + kBool) return bias == 0 ? s : bias;
  const float sum = __fmaf_rn(bias, kScoreMode == 0 ? p.bias_factor : kScoreMod ? 1.f : 1.4426950408889634f, s);
  return hides && bias < float(kHidingBias) ? -infinity() : sum;
}

// The score of a product s of q and k; `bias` is the dense bias there. With kScoreMode 0 it is divided by the scale,
// which is part of exponents; with 1 it is in units of log2, with score_mod in natural units. `masks`: mask_mod is
// applied; otherwise the caller has to. `bias_hides`: `hides` of biased_score.
template <bool masks = true, bool bias_hides = true, class Params>
__device__ __forceinline__ float score(const Params& p, const ScoreContext& at, float s, float bias) {
  if (kScoreMode != 0) s = modified_score(p, at, s);
  if (kBias) s = biased_score<bias_hides>(p, s, bias);
  return masks && mask_mod_hides(p, at) ? -infinity() : s;
}

// Whether score_mod hides the key of an entry: its score becomes -inf.
template <class Params>
__device__ __forceinline__ bool score_mod_hides(const Params& p, const ScoreContext& at, float s) {
  return kScoreMod && modified_score(p, at, s) == -infinity();
}

// Whether mask_mod or score_mod hides the key of an entry.
template <class Params>
__device__ __forceinline__ bool mods_hide(const Params& p, const ScoreContext& at, float s) {
  return mask_mod_hides(p, at) || score_mod_hides(p, at, s);
}

// The derivative of a score by scale * s; 0 where the score is hidden.
template <class Params>
__device__ __forceinline__ float score_slope(const Params& p, const ScoreContext& at, float s) {
  float slope = kSoftcap ? softcap_slope(p, s) : 1;
  if constexpr (kScoreModSlope != 0) {
    slope *= expression_slope(expression_place(p, at), natural_score(p, at, s));
    if (score_mod_hides(p, at, s)) slope = 0;
  }
  return slope;
}

// The score of a product in units of log2, and `shift`: the exponent of an entry of P.
template <bool masks = true, class Params>
__device__ __forceinline__ float exponent(const Params& p, const ScoreContext& at, float s, float bias, float shift) {
  s = score<masks>(p, at, s, bias);
  return kScoreMode == 0 || kScoreMod ? __fmaf_rn(s, score_factor(p), shift) : __fadd_rn(s, shift);
}

// The same if the shift is -LSE, so that the exponent is at most `limit`: with large scores, LSE is rounded by more.
template <bool masks = true, class Params>
__device__ __forceinline__ float exponent_up_to(const Params& p, const ScoreContext& at, float s, float bias,
                                                float shift, float limit) {
  const float x = exponent<masks>(p, at, s, bias, shift);
  return (kBias && !kMaskBits) || kScoreMod ? min_or_nan(x, limit) : x;
}
