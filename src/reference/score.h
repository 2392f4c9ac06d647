/// How one entry of S and of the dropout mask Z is made from a head's rule.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "reference/head.h"
#include "reference/matrix.h"

namespace fulgur::reference {

/// S_ij and its derivative by the dot product q_i . k_j.
struct Score {
  double S, dS_dqk;
};

/// floor(key / chunk); a key may be one in front of the first.
inline int64_t chunk_of(const Band& band, int64_t key) {
  return key >= 0 ? key / band.chunk : -1 - (-1 - key) / band.chunk;
}

/// S_ij = -inf is the papers' MASK. Such an entry is skipped wherever it would be used, never
/// multiplied by 0: k_j and v_j may be NaN. Here k_j is not even read.
inline Score score(const Head& h, int64_t i, int64_t j) {
  const Rule& rule = h.rule;
  const int64_t diagonal = i + h.sk - h.sq;  // the key aligned with query i: bottom right
  const int64_t distance = j - diagonal;
  if (rule.band.left >= 0 && -distance > rule.band.left) return {-kInf, 0};
  if (rule.band.right >= 0 && distance > rule.band.right) return {-kInf, 0};
  if (rule.band.chunk > 0 && chunk_of(rule.band, j) != chunk_of(rule.band, diagonal)) {
    return {-kInf, 0};
  }
  const int64_t token = j - (h.sk - h.sq);  // of the queries' own
  if (rule.tree != nullptr && token >= 0 && (rule.tree[i] >> token & 1) == 0) return {-kInf, 0};
  double S = rule.scale * dot(h.d, h.q + i * h.d, h.k + j * h.d);
  double dS_dqk = rule.scale;
  if (rule.softcap > 0) {
    const double t = std::tanh(S / rule.softcap);
    S = rule.softcap * t;
    dS_dqk *= 1 - t * t;
  }
  return {S - rule.slope * static_cast<double>(std::abs(distance)), dS_dqk};
}

/// Z_ij x: x / (1 - p) for a kept entry, 0 for a dropped one, also if x is NaN. FlashAttention,
/// Alg. 4, line 14.
class DropoutFactor {
 public:
  explicit DropoutFactor(const Rule& rule) : dropout_(rule.dropout), head_index_(rule.head_index) {}
  double operator()(int64_t i, int64_t j, double x) const {
    if (dropout_.p == 0) return x;
    return dropout_.mask.keeps(head_index_, i, j) ? x / (1 - dropout_.p) : 0;
  }

 private:
  Dropout dropout_;
  uint64_t head_index_;
};

}  // namespace fulgur::reference
