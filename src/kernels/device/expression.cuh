// Expressions of a call (score_mod, mask_mod) at the place of a score. The functions expression_score, expression_slope
// and expression_mask are printed for each graph, node by node (cuda/common/expression.cpp), and use ExpressionPlace.
// They are templates, because kernel_config.h comes before it. Every rounding is explicit, as in score.cuh.
#pragma once
#include "kernel_config.h"
#include "device/elements.cuh"
#include "device/lengths.cuh"
#include "device/math.cuh"
#include "host_device/attention_params.h"
#include "host_device/score.h"

enum : int { kExpressions = kScoreMod || kMaskMod };

// As fulgur::DType numbers them.
template <int dtype>
struct ExpressionElement {
  using Memory = unsigned short;
  static __device__ __forceinline__ float value(Memory x) { return to_f32<Element(dtype)>(x); }
};
template <>
struct ExpressionElement<kF32> {
  using Memory = float;
  static __device__ __forceinline__ float value(float x) { return x; }
};
template <>
struct ExpressionElement<kF64> {
  using Memory = double;
  static __device__ __forceinline__ float value(double x) { return float(x); }
};
template <>
struct ExpressionElement<kI32> {
  using Memory = int;
  static __device__ __forceinline__ int value(int x) { return x; }
};
template <>
struct ExpressionElement<kI64> {
  using Memory = long long;
  static __device__ __forceinline__ int value(long long x) { return int(u32(x)); }
};
template <>
struct ExpressionElement<kBool> {
  using Memory = unsigned char;
  static __device__ __forceinline__ bool value(unsigned char x) { return x != 0; }
};

// The place of a score, and the functions that printed functions call.
struct ExpressionPlace {
  const ExpressionArguments& arguments;
  int b, h, hk, q, k, sq, sk, q0;
  float apart, delta;  // k - q, and k - q - (sk - sq)

#ifdef FULGUR_EXPRESSIONS
  __device__ __forceinline__ int integer(int word) const { return arguments.words[word]; }
  __device__ __forceinline__ float number(int word) const { return __int_as_float(arguments.words[word]); }
  __device__ __forceinline__ int floor_div(int x, int word) const {
    return floor_quotient(x, {u32(arguments.words[word]), arguments.words[word + 1]});
  }
  __device__ __forceinline__ int mod(int x, int word) const {
    return x - floor_div(x, word) * arguments.words[word + 2];
  }

  // An element of a tensor; indices are clamped. Offset: the type of offsets in the tensor.
  template <int dtype, class Offset, class... Index>
  __device__ __forceinline__ auto gather(int tensor, Index... indices) const {
    using Type = ExpressionElement<dtype>;
    const ExpressionTensor& t = arguments.tensors[tensor];
    const int index[] = {indices...};
    Offset at = 0;
#pragma unroll
    for (int i = 0; i < int(sizeof...(Index)); ++i)
      at += Offset(min(max(index[i], 0), t.last[i])) * Offset(t.stride[i]);
    return Type::value(static_cast<const typename Type::Memory*>(t.data)[at]);
  }

  // The row-major number of an element in its tensor; indices are clamped.
  template <class... Index>
  __device__ __forceinline__ int element(int tensor, Index... indices) const {
    const ExpressionTensor& t = arguments.tensors[tensor];
    const int index[] = {indices...};
    int at = 0;
#pragma unroll
    for (int i = 0; i < int(sizeof...(Index)); ++i) at = at * (t.last[i] + 1) + min(max(index[i], 0), t.last[i]);
    return at;
  }
#endif

  // NaN if an operand is NaN.
  static __device__ __forceinline__ float minimum(float x, float y) { return x != x || x < y ? x : y; }
  static __device__ __forceinline__ float maximum(float x, float y) { return x != x || x > y ? x : y; }
  static __device__ __forceinline__ int to_int(float x) {
    if (!(x > -2147483648.f)) return x == x ? -2147483647 - 1 : 0;
    return x < 2147483648.f ? int(x) : 2147483647;
  }
  static __device__ __forceinline__ float exp(float x) { return exp2_fast(__fmul_rn(x, 1.4426950408889634f)); }
  static __device__ __forceinline__ float exp2(float x) { return exp2_fast(x); }
  static __device__ __forceinline__ float log(float x) { return __fmul_rn(log2_fast(x), 0.693147180559945f); }
  static __device__ __forceinline__ float sigmoid(float x) { return reciprocal_fast(__fadd_rn(1, exp(-x))); }
  static __device__ __forceinline__ float tanh(float x) {  // host_device/score.h
    const float u = __fmul_rn(x, 2 * 1.4426950408889634f);
    const float from_center = __fmaf_rn(u, u, -float(kTanhCenter));
    const float polynomial = __fmaf_rn(from_center, from_center, float(kTanhRest));
    const float large = __fmaf_rn(-2, reciprocal_fast(__fadd_rn(exp2_fast(u), 1)), 1);
    const float small = __fmul_rn(__fmul_rn(x, float(kTanhSquare)), polynomial);
    return from_center < float(kTanhSmall * kTanhSmall - kTanhCenter) ? small : large;
  }
  static __device__ __forceinline__ float sqrt(float x) { return sqrtf(x); }
  static __device__ __forceinline__ float rsqrt(float x) { return __fdiv_rn(1, sqrtf(x)); }
  static __device__ __forceinline__ float sin(float x) { return sinf(x); }
  static __device__ __forceinline__ float cos(float x) { return cosf(x); }
  static __device__ __forceinline__ float erf(float x) { return erff(x); }
  static __device__ __forceinline__ float pow(float x, float y) { return powf(x, y); }
};

// The place of a query and a key in the whole call, of which this call may be a part.
template <class Params>
__device__ __forceinline__ ExpressionPlace expression_place(const Params& p, const Lengths& n, int batch, int head,
                                                            int query, int key) {
  if constexpr (kPart != 0) {
    const auto& whole = p.expression;
    const int h = whole.head + head;
    return {whole, whole.batch + batch, h, h / p.group, p.part.query + query, p.part.key + key, whole.queries,
            whole.keys, 0, 0, 0};
  } else {
    return {p.expression, batch, head, head / p.group, query, key, n.sq, n.sk, kPacked ? n.q_start : 0, 0, 0};
  }
}
