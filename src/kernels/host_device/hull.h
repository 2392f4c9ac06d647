// Interval arithmetic for expressions: a hull is the interval of the values of a node, and each operation computes the
// hull of its result from those of its operands. So a tile of scores is known to be hidden or shown whole without
// computing each score. Used on the host by expression/hulls.h, on the device by maps/node_hulls.cuh.
#pragma once
#include "host_device/host_device.h"
#ifndef __CUDACC__
#include <cmath>
#define FULGUR_HULL inline
#else
#define FULGUR_HULL __device__ __forceinline__
#endif

namespace fulgur::kernels {

// Numbered as expression::Type.
enum HullType : int { kBoolHull, kIntHull, kFloatHull };

constexpr double kUnboundedHull = __builtin_bit_cast(double, 0x7ff0000000000000ull);
constexpr double kMinInt = -2147483648.0, kMaxInt = 2147483647.0;

// `hashes` is the set of the 6-bit hashes of integers: two sets whose intervals overlap are disjoint if their hashes
// are. For other values it has all hashes.
struct Hull {
  double low = -kUnboundedHull;
  double high = kUnboundedHull;
  bool may_be_nan = true;
  u64 hashes = ~0ull;

  FULGUR_HULL bool known() const { return low == high && !may_be_nan; }
};

FULGUR_HULL Hull hull_of_type(HullType type) {
  if (type == kFloatHull) return {};
  if (type == kBoolHull) return {0, 1, false};
  return {kMinInt, kMaxInt, false};
}

FULGUR_HULL Hull certain_hull(bool value) { return {value ? 1.0 : 0.0, value ? 1.0 : 0.0, false}; }
FULGUR_HULL Hull either_hull() { return {0, 1, false}; }

FULGUR_HULL u64 hash_of(int value) { return 1ull << (u32(value) * 0x9e3779b1u >> 26); }

FULGUR_HULL Hull hull_of(bool value) { return certain_hull(value); }
FULGUR_HULL Hull hull_of(int value) { return {double(value), double(value), false, hash_of(value)}; }
FULGUR_HULL Hull hull_of(float value) {
  if (value != value) return {};
  return {double(value), double(value), false};
}

// The hull of integers, if they do not overflow.
FULGUR_HULL Hull integer_hull(double low, double high) {
  if (low < kMinInt || high > kMaxInt) return hull_of_type(kIntHull);
  return {low, high, false};
}

// The hull of floats, widened by the rounding of an operation. A sum or product of infinities may be NaN.
FULGUR_HULL Hull float_hull(double low, double high, bool may_be_nan) {
  constexpr double kError = 0x1p-22, kSmallest = 0x1p-126;
  if (!(fabs(low) < kUnboundedHull) || !(fabs(high) < kUnboundedHull)) return {};
  return {low - fabs(low) * kError - kSmallest, high + fabs(high) * kError + kSmallest, may_be_nan};
}

FULGUR_HULL Hull number_hull(HullType type, double low, double high, bool may_be_nan) {
  return type == kIntHull ? integer_hull(low, high) : float_hull(low, high, may_be_nan);
}

FULGUR_HULL double min_value(double a, double b) { return a < b ? a : b; }
FULGUR_HULL double max_value(double a, double b) { return a > b ? a : b; }

FULGUR_HULL Hull join_hulls(const Hull& x, const Hull& y) {
  return {min_value(x.low, y.low), max_value(x.high, y.high), x.may_be_nan || y.may_be_nan, x.hashes | y.hashes};
}

// Operations. `type`: the type of the operands.
FULGUR_HULL Hull hull_add(HullType type, const Hull& x, const Hull& y) {
  return number_hull(type, x.low + y.low, x.high + y.high, x.may_be_nan || y.may_be_nan);
}
FULGUR_HULL Hull hull_sub(HullType type, const Hull& x, const Hull& y) {
  return number_hull(type, x.low - y.high, x.high - y.low, x.may_be_nan || y.may_be_nan);
}
FULGUR_HULL Hull hull_mul(HullType type, const Hull& x, const Hull& y) {
  const double a = x.low * y.low, b = x.low * y.high, c = x.high * y.low, d = x.high * y.high;
  if (a != a || b != b || c != c || d != d) return hull_of_type(type);
  return number_hull(type, min_value(min_value(a, b), min_value(c, d)), max_value(max_value(a, b), max_value(c, d)),
                     x.may_be_nan || y.may_be_nan);
}
FULGUR_HULL Hull hull_floor_div(HullType, const Hull& x, const Hull& by) {
  return {floor(x.low / by.low), floor(x.high / by.low), false};
}
FULGUR_HULL Hull hull_mod(HullType, const Hull& x, const Hull& by) {
  const double turn = floor(x.low / by.low);
  if (turn != floor(x.high / by.low)) return {0, by.low - 1, false};
  return {x.low - turn * by.low, x.high - turn * by.low, false};
}
FULGUR_HULL Hull hull_min(HullType, const Hull& x, const Hull& y) {
  return {min_value(x.low, y.low), min_value(x.high, y.high), x.may_be_nan || y.may_be_nan};
}
FULGUR_HULL Hull hull_max(HullType, const Hull& x, const Hull& y) {
  return {max_value(x.low, y.low), max_value(x.high, y.high), x.may_be_nan || y.may_be_nan};
}
FULGUR_HULL Hull hull_neg(HullType type, const Hull& x) { return number_hull(type, -x.high, -x.low, x.may_be_nan); }
FULGUR_HULL Hull hull_abs(HullType type, const Hull& x) {
  const double a = fabs(x.low), b = fabs(x.high);
  return number_hull(type, x.low <= 0 && x.high >= 0 ? 0 : min_value(a, b), max_value(a, b), x.may_be_nan);
}
FULGUR_HULL Hull hull_shift_right(HullType type, const Hull& x, const Hull& by) {
  if (!by.known()) return hull_of_type(type);
  const double divisor = double(1ll << (int(by.low) & 31));
  return {floor(x.low / divisor), floor(x.high / divisor), false};
}
FULGUR_HULL Hull hull_and(HullType type, const Hull& x, const Hull& y) {
  if (type == kBoolHull) return {min_value(x.low, y.low), min_value(x.high, y.high), false};
  // Bits that one operand cannot have, the result cannot have.
  if (x.low >= 0 && y.low >= 0) return {0, min_value(x.high, y.high), false};
  if (x.low >= 0) return {0, x.high, false};
  return y.low >= 0 ? Hull{0, y.high, false} : hull_of_type(type);
}
FULGUR_HULL Hull hull_or(HullType type, const Hull& x, const Hull& y) {
  if (type != kBoolHull) return hull_of_type(type);
  return {max_value(x.low, y.low), max_value(x.high, y.high), false};
}
FULGUR_HULL Hull hull_xor(HullType type, const Hull& x, const Hull& y) {
  return type == kBoolHull && x.known() && y.known() ? certain_hull(x.low != y.low) : hull_of_type(type);
}
FULGUR_HULL Hull hull_not(HullType, const Hull& x) { return {1 - x.high, 1 - x.low, false}; }
FULGUR_HULL Hull hull_equal(HullType type, const Hull& x, const Hull& y) {
  if (x.high < y.low || y.high < x.low) return certain_hull(false);
  if (x.known() && y.known()) return certain_hull(true);
  return type == kIntHull && (x.hashes & y.hashes) == 0 ? certain_hull(false) : either_hull();
}
FULGUR_HULL Hull hull_not_equal(HullType type, const Hull& x, const Hull& y) {
  return x.may_be_nan || y.may_be_nan ? either_hull() : hull_not(kBoolHull, hull_equal(type, x, y));
}
FULGUR_HULL Hull hull_less(HullType, const Hull& x, const Hull& y) {
  if (x.low >= y.high) return certain_hull(false);
  return x.high < y.low && !x.may_be_nan && !y.may_be_nan ? certain_hull(true) : either_hull();
}
FULGUR_HULL Hull hull_less_equal(HullType, const Hull& x, const Hull& y) {
  if (x.low > y.high) return certain_hull(false);
  return x.high <= y.low && !x.may_be_nan && !y.may_be_nan ? certain_hull(true) : either_hull();
}
FULGUR_HULL Hull hull_floor(HullType, const Hull& x) { return {floor(x.low), floor(x.high), x.may_be_nan}; }
FULGUR_HULL Hull hull_to_float(HullType, const Hull& x) { return float_hull(x.low, x.high, false); }
FULGUR_HULL Hull hull_to_int(HullType, const Hull& x) {
  if (x.may_be_nan || x.low < kMinInt || x.high > kMaxInt) return hull_of_type(kIntHull);
  return {trunc(x.low), trunc(x.high), false};
}
FULGUR_HULL Hull hull_select(HullType, const Hull& condition, const Hull& yes, const Hull& no) {
  return condition.low == 1 ? yes : condition.high == 0 ? no : join_hulls(yes, no);
}

// The elements of a dimension of a tensor that clamped indices may name.
struct HullRange {
  int first, count;
};
FULGUR_HULL HullRange hull_range(const Hull& index, double last) {
  const int first = int(min_value(max_value(index.low, 0), last));
  return {first, int(min_value(max_value(index.high, 0), last)) - first + 1};
}
enum : int { kMaxHullBox = 16 };  // maximum of elements of a tensor that are loaded for a tile

}  // namespace fulgur::kernels
