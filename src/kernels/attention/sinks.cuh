// An attention sink is a score of a head, in the units of LSE, that joins the softmax of each of its rows as one more
// key without a value. It joins after all keys of a row: splits of a row are computed without it.
#pragma once
#include "device/elements.cuh"
#include "host_device/attention_params.h"
#include "attention/softmax.cuh"

// A row with its sink.
struct SinkJoined {
  float lse;
  float keys;  // the share of its keys in the softmax, by which O shrinks
};

// `lse`: of the keys alone, -inf where the row sees none. A sink of -inf leaves every bit as it is.
__device__ __forceinline__ SinkJoined join_sink(float sink, float lse) {
  if (lse == -infinity()) return {sink, 0};
  if (sink == -infinity()) return {lse, 1};
  const float above = sink - lse;
  const float lesser = exp2_fast(-fabsf(above) * 1.4426950408889634f);  // of the two, relative to the other
  return {(above > 0 ? sink : lse) + log2_fast(1 + lesser) * 0.693147180559945f,
          (above > 0 ? lesser : 1) * reciprocal_fast(1 + lesser)};
}

// What the products of a row of a head must be multiplied with in the end, and its LSE.
__device__ __forceinline__ float normalizer(const Sinks& sinks, int head, float sum, float shift) {
  if (!kHasSinks) return normalizer(sum);
  return normalizer(sum) * join_sink(element_at(sinks.data, sinks.type, head), lse_of(sum, shift)).keys;
}
__device__ __forceinline__ float lse_of(const Sinks& sinks, int head, float sum, float shift) {
  const float lse = lse_of(sum, shift);
  return kHasSinks ? join_sink(element_at(sinks.data, sinks.type, head), lse).lse : lse;
}
