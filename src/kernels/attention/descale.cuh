// Descales: what multiplies codes of 8 bits to make the numbers that they stand for. Each sequence and kv head has one
// for q, for k and for v. Products of codes take those of q and k before they are scores, and O takes that of v at the
// end.
#pragma once
#include "device/math.cuh"
#include "device/operands.cuh"
#include "device/score.cuh"
#include "host_device/attention_params.h"
#include "host_device/key_walk.h"

enum : int { kHasCodes = ElementQ::kType == kE4M3 };

__device__ __forceinline__ float descale_of(const Descale& descale, int batch, int kv_head) {
  if (descale.data == nullptr) return 1;
  const long long at = batch * descale.batch + kv_head * descale.head;
  if (descale.type == kF32) return static_cast<const float*>(descale.data)[at];
  return half_to_float(static_cast<const unsigned short*>(descale.data)[at]);
}

// The descale of products of q and k. One that is not finite becomes NaN, like a sum of infinities of both signs.
__device__ __forceinline__ float product_descale(const AttentionParams& p, int batch, int kv_head) {
  const float descale = descale_of(p.q_descale, batch, kv_head) * descale_of(p.k_descale, batch, kv_head);
  return fabsf(descale) < infinity() ? descale : __int_as_float(0x7fffffff);
}

// The descale of V.
__device__ __forceinline__ float value_descale(const AttentionParams& p, int batch, int kv_head) {
  return kHasCodes ? descale_of(p.v_descale, batch, kv_head) : 1;
}

// Factors of products, which make them scores, and of scores, which make them exponents. Where scores are not
// transformed both are one factor of the scores, if it is positive and not rounded; otherwise of the products.
struct ProductScale {
  float of_products, of_scores;
};

__device__ __forceinline__ ProductScale product_scale(const AttentionParams& p, int batch, int kv_head) {
  const float descale = product_descale(p, batch, kv_head);
  if (kScoreMode != 0) return {descale, score_factor(p)};
  const float factor = descale * p.scale_log2;
  const bool folds = factor >= 0x1p-126f && factor < infinity();
  return {folds ? 1 : factor, folds ? factor : 1};
}
