/// The data every reference algorithm works on: one attention head in double precision.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/bias.h"
#include "kernels/host_device/dropout.h"

namespace fulgur::reference {

/// Query i, at key D(i) = i + sk - sq, or i where top_left is set, sees the keys j in
/// [D(i) - left, D(i) + right]; -1 is unbounded. Causal is right = 0. Where chunk > 0, of these the
/// keys j with floor(j / chunk) = floor(D(i) / chunk).
struct Band {
  int64_t left = -1, right = -1, chunk = 0;
  bool top_left = false;
};

struct Dropout {
  double p = 0;
  kernels::DropoutMask mask{};
};

/// The place of a head's queries and keys in longer ones, of which they are a part.
struct Part {
  int64_t query = 0, key = 0;  ///< the first ones
  int64_t shift = 0;           ///< how far diagonals lie after those of whole ones
};

class HeadExpressions;

/// How a score is made from q.k: scale, then softcap * tanh(s / softcap), then ALiBi
/// -slope * |D(i) - j|, then the score expression, then the dense bias, then the band mask, the
/// tree mask and the mask expression; then the softmax, which the sink joins; after it dropout.
struct Rule {
  double scale = 1;
  double softcap = 0;  // 0: none
  double slope = 0;
  double sink = -std::numeric_limits<double>::infinity();  // none
  Band band = {};
  const uint64_t* tree = nullptr;  // [sq]: bit j: query i sees key sk - sq + j; null: all
  Dropout dropout = {};
  uint64_t head_index = 0;                 // b * hq + h: the Philox stream of this head
  HeadBias bias = {};                      // its -inf hides keys
  HeadExpressions* expressions = nullptr;  // null: none
  Part part = {};
};

/// One head, dense row-major: q [sq, d], k [sk, d], v [sk, dv]. sq and sk may be 0.
struct Head {
  int64_t sq, sk, d, dv;
  const double *q, *k, *v;
  Rule rule;
};

/// A row that sees no key has O = 0 and LSE = sink.
struct Forward {
  std::vector<double> o /*[sq, dv]*/, lse /*[sq]*/;
};

/// The gradients that a backward pass begins with.
struct OutputGradient {
  const double* o;              // [sq, dv]
  const double* lse = nullptr;  // [sq]; null: 0
  double lse_of(int64_t i) const { return lse == nullptr ? 0 : lse[i]; }
};

/// Where the gradient of a head's bias is added: dS_ij, the derivative by the score.
struct BiasGradient {
  double* data = nullptr;  // null: not computed
  int64_t row = 0, key = 0;

  void add(int64_t i, int64_t j, double dS) const {
    if (data != nullptr) data[i * row + j * key] += dS;
  }
};

struct Backward {
  std::vector<double> dq /*[sq, d]*/, dk /*[sk, d]*/, dv /*[sk, dv]*/;
  double dsink = 0;
};

/// What an algorithm does: elements moved between slow and fast memory, and its work on tiles,
/// whatever their mask hides.
struct Traffic {
  uint64_t loaded = 0, stored = 0;
  uint64_t products = 0;      ///< multiplications, each with an addition, of matrix products
  uint64_t exponentials = 0;  ///< of scores
  uint64_t rescales = 0;      ///< rows of O that move to a new maximum
};

}  // namespace fulgur::reference
