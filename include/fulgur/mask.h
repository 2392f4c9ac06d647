#pragma once

#include <cstdint>

namespace fulgur {

/// A band of visible keys, aligned bottom-right: query i of sq sees the keys j of sk with
/// i + sk - sq - left <= j <= i + sk - sq + right. -1 means unbounded on that side.
struct Mask {
  int64_t left = -1;
  int64_t right = -1;
  /// Of these keys, those of the query's chunk: floor(j / chunk) = floor((i + sk - sq) / chunk), as
  /// the local layers of Llama 4 have it. 0 is off.
  int64_t chunk = 0;
  bool operator==(const Mask&) const = default;
};

/// Every query sees every key.
constexpr Mask full() { return {}; }
/// No query sees a key to its right.
constexpr Mask causal() { return {-1, 0}; }
/// A sliding window of `left` keys before and `right` keys after the diagonal (-1: unbounded).
constexpr Mask window(int64_t left, int64_t right) { return {left, right}; }
/// Of what another mask shows, each query sees the keys of its own chunk of `chunk` keys.
constexpr Mask chunked(int64_t chunk, const Mask& of = full()) {
  return {of.left, of.right, chunk};
}

}  // namespace fulgur
