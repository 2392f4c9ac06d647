// What codes of 8 bits are multiplied by to be the numbers that they stand for: of each sequence and kv head a factor
// of q, of k and of v. Products of codes take those of q and k before they are scores, and O takes that of v in the
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

// Of products of q and k. One that is not finite makes NaN, as sums of infinities of both signs are.
__device__ __forceinline__ float product_descale(const AttentionParams& p, int batch, int kv_head) {
  const float descale = descale_of(p.q_descale, batch, kv_head) * descale_of(p.k_descale, batch, kv_head);
  return fabsf(descale) < infinity() ? descale : __int_as_float(0x7fffffff);
}

// Of V.
__device__ __forceinline__ float value_descale(const AttentionParams& p, int batch, int kv_head) {
  return kHasCodes ? descale_of(p.v_descale, batch, kv_head) : 1;
}

// How products become exponents: multiplied with `first`, then scores, then with `then`. Without a transformation of
// scores both are one factor of the exponent, if it is positive and not rounded; else the products take it.
struct ProductScale {
  float first, then;
};

__device__ __forceinline__ ProductScale product_scale(const AttentionParams& p, int batch, int kv_head) {
  const float descale = product_descale(p, batch, kv_head);
  if (kScoreMode != 0) return {descale, score_factor(p)};
  const float factor = descale * p.scale_log2;
  const bool folds = factor >= 0x1p-126f && factor < infinity();
  return {folds ? 1 : factor, folds ? factor : 1};
}
