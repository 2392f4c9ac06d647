#pragma once

#include <cstdint>

namespace fulgur {

/// A band of visible keys around a diagonal: query i of sq, at key D(i), sees the keys j of sk with
/// D(i) - left <= j <= D(i) + right. -1 means unbounded on that side. The mask is aligned
/// bottom-right, D(i) = i + sk - sq (the last query is at the last key), or top-left.
struct Mask {
  int64_t left = -1;
  int64_t right = -1;
  /// A query sees only keys of its own chunk: floor(j / chunk) = floor(D(i) / chunk), as in the
  /// local layers of Llama 4. 0 is off.
  int64_t chunk = 0;
  /// D(i) = i: the first query is at the first key of its sequence, whatever sq and sk are. ALiBi
  /// counts distances from there, too. Not with a tree mask, and not with rotary embeddings, whose
  /// queries are the last tokens.
  bool top_left = false;
  bool operator==(const Mask&) const = default;
};

/// Every query sees every key.
constexpr Mask full() { return {}; }
/// No query sees a key to its right.
constexpr Mask causal() { return {-1, 0}; }
/// A sliding window of `left` keys before and `right` keys after the diagonal (-1: unbounded).
constexpr Mask window(int64_t left, int64_t right) { return {left, right}; }
/// The mask `of`, under which each query also sees only the keys of its own chunk of `chunk` keys.
constexpr Mask chunked(int64_t chunk, const Mask& of = full()) {
  return {of.left, of.right, chunk, of.top_left};
}
/// Another mask, aligned top-left.
constexpr Mask top_left(const Mask& of) { return {of.left, of.right, of.chunk, true}; }

}  // namespace fulgur
