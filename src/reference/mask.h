/// The mask hook: which keys a query sees, and which tiles hold none that a query of theirs sees.
#pragma once

#include <cstdint>

#include "reference/expressions.h"
#include "reference/head.h"

namespace fulgur::reference {

/// Queries or keys [begin, end).
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// The key on the diagonal of query i.
inline int64_t diagonal_of(const Head& h, int64_t i) {
  return (h.rule.band.top_left ? i : i + h.sk - h.sq) + h.rule.part.shift;
}

/// The distance of key j from the key on the diagonal of query i.
inline int64_t distance(const Head& h, int64_t i, int64_t j) { return j - diagonal_of(h, i); }

/// floor(key / chunk) of a key, which may be one in front of the first.
inline int64_t chunk_of(const Rule& rule, int64_t j) {
  const int64_t key = rule.part.key + j, chunk = rule.band.chunk;
  return key >= 0 ? key / chunk : -1 - (-1 - key) / chunk;
}

/// Query i sees key j: the band, its chunk, the tree and the mask expression show it.
inline bool sees(const Head& h, int64_t i, int64_t j) {
  const Rule& rule = h.rule;
  const int64_t away = distance(h, i, j);
  if (rule.band.left >= 0 && -away > rule.band.left) return false;
  if (rule.band.right >= 0 && away > rule.band.right) return false;
  if (rule.band.chunk > 0 && chunk_of(rule, j) != chunk_of(rule, j - away)) return false;
  const int64_t token = j - (h.sk - h.sq);  // of the queries' own
  if (rule.tree != nullptr && token >= 0 && (rule.tree[i] >> token & 1) == 0) return false;
  return rule.expressions == nullptr || rule.expressions->sees(i, j);
}

/// All keys of J lie in chunks before or after those of the queries of I.
inline bool in_other_chunks(const Head& h, Range I, Range J) {
  const Rule& rule = h.rule;
  return chunk_of(rule, J.end - 1) < chunk_of(rule, diagonal_of(h, I.begin)) ||
         chunk_of(rule, J.begin) > chunk_of(rule, diagonal_of(h, I.end - 1));
}

/// No query of I sees a key of J: the corner of the tile nearest to the band lies outside it.
inline bool empty(const Head& h, Range I, Range J) {
  const Band& band = h.rule.band;
  if (band.chunk > 0 && in_other_chunks(h, I, J)) return true;
  const int64_t lowest = distance(h, I.end - 1, J.begin), highest = distance(h, I.begin, J.end - 1);
  return (band.right >= 0 && lowest > band.right) || (band.left >= 0 && -highest > band.left);
}

}  // namespace fulgur::reference
