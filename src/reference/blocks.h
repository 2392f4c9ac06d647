/// The machine of the papers: a large slow memory, a fast one of M elements, blocks that fit it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/head.h"
#include "reference/score.h"

namespace fulgur::reference {

inline void load(Traffic* traffic, int64_t elements) {
  if (traffic) traffic->loaded += elements;
}
inline void store(Traffic* traffic, int64_t elements) {
  if (traffic) traffic->stored += elements;
}

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// The range cut into blocks of B; the last one may be shorter.
inline std::vector<Range> blocks(Range range, int64_t B) {
  std::vector<Range> all;
  for (int64_t begin = range.begin; begin < range.end; begin += B) {
    all.push_back({begin, std::min(begin + B, range.end)});
  }
  return all;
}

/// FlashAttention, Alg. 1, line 1: the blocks of the outer loop have ceil(M / 4d) rows, those of
/// the inner loop min(ceil(M / 4d), d). 4d is a row of Q, K, V and O, 2 (d + dv) if the widths
/// differ; the second bound keeps S_ij within M / 4.
struct BlockSizes {
  BlockSizes(int64_t M, const Head& h)
      : outer((M + 2 * (h.d + h.dv) - 1) / (2 * (h.d + h.dv))),
        inner(std::min(outer, (h.d + h.dv) / 2)) {}
  int64_t outer, inner;
};

/// S_ij = MASK(Q_i K_j^T) of one tile.
inline Matrix scores(const Head& h, Range I, Range J) {
  Matrix S(I.size(), J.size());
  for (int64_t i = I.begin; i < I.end; ++i) {
    for (int64_t j = J.begin; j < J.end; ++j) {
      S[i - I.begin][j - J.begin] = score(h, i, j).S;
    }
  }
  return S;
}

/// All keys of J lie in chunks before or after those of the queries of I.
inline bool in_other_chunks(const Head& h, Range I, Range J) {
  const Band& band = h.rule.band;
  const int64_t diagonal = h.sk - h.sq;  // of query 0
  return chunk_of(band, J.end - 1) < chunk_of(band, diagonal + I.begin) ||
         chunk_of(band, J.begin) > chunk_of(band, diagonal + I.end - 1);
}

/// No query of I sees a key of J: the corner of the tile nearest to the band lies outside it.
inline bool empty(const Head& h, Range I, Range J) {
  const Band& band = h.rule.band;
  if (band.chunk > 0 && in_other_chunks(h, I, J)) return true;
  // The least and the greatest distance j - (i + sk - sq) in the tile.
  const int64_t lowest = J.begin - (I.end - 1 + h.sk - h.sq);
  const int64_t highest = J.end - 1 - (I.begin + h.sk - h.sq);
  return (band.right >= 0 && lowest > band.right) || (band.left >= 0 && -highest > band.left);
}

}  // namespace fulgur::reference
