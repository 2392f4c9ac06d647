/// The machine of the papers: a large slow memory, a fast one of M elements, blocks that fit it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/head.h"
#include "reference/mask.h"
#include "reference/score.h"

namespace fulgur::reference {

inline void load(Traffic* traffic, int64_t elements) {
  if (traffic) traffic->loaded += elements;
}
inline void store(Traffic* traffic, int64_t elements) {
  if (traffic) traffic->stored += elements;
}

/// The work on a tile of a head.
inline void work(Traffic* traffic, int64_t scores, int64_t dims, int64_t rescales = 0) {
  if (!traffic) return;
  traffic->products += scores * dims;
  traffic->exponentials += scores;
  traffic->rescales += rescales;
}

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

}  // namespace fulgur::reference
