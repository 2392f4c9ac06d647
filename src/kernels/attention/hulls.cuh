// What printed functions that classify tiles call (cuda/common/expression.cpp): kernel_config.h includes this.
#pragma once
#include "device/expression.cuh"
#include "host_device/hull.h"
#include "host_device/tile_map.h"

// The value of a node as an int of the same order. Those of NaN lie outside of the infinities.
__device__ __forceinline__ int node_value(int x) { return x; }
__device__ __forceinline__ int node_value(bool x) { return x; }
__device__ __forceinline__ int node_value(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ __forceinline__ Hull node_hull(HullType type, const NodeHull& of) {
  if (type != kFloatHull) return {double(of.low), double(of.high), false, of.hashes};
  const int low = node_value(-infinity()), high = node_value(infinity());
  if (of.low < low || of.high > high) return {};
  const auto number = [](int value) { return double(__int_as_float(value ^ (value >> 31 & 0x7fffffff))); };
  return {number(of.low), number(of.high), false};
}

// The elements of a tensor that indices in these hulls name, where they are few.
template <int dtype, class... Index>
__device__ __forceinline__ Hull hull_gather(HullType type, const ExpressionTensor& t, const Index&... indices) {
  using Element = ExpressionElement<dtype>;
  constexpr int kRank = sizeof...(Index);
  HullRange ranges[kRank + 1] = {};
  int dimension = 0, box = 1;
  const auto add = [&](const Hull& index) {
    ranges[dimension] = hull_range(index, t.last[dimension]);
    box = min(box * min(ranges[dimension].count, kMaxHullBox + 1), kMaxHullBox + 1);
    ++dimension;
  };
  (add(indices), ...);
  if (box > kMaxHullBox) return hull_of_type(type);
  Hull all;
  for (int n = 0; n < box; ++n) {
    long long at = 0;
    int rest = n;
#pragma unroll
    for (int i = 0; i < kRank; ++i) {
      at += (ranges[i].first + rest % ranges[i].count) * t.stride[i];
      rest /= ranges[i].count;
    }
    const Hull one = hull_of(Element::value(static_cast<const typename Element::Memory*>(t.data)[at]));
    all = n == 0 ? one : join_hulls(all, one);
  }
  return all;
}
