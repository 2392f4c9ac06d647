/// The one list of attention problems that every engine is tested on, forward and backward.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "fulgur/attention.h"

namespace fulgur::test {

/// How the tensors of a case lie in memory.
enum class Layout {
  kBshd,          ///< (batch, seqlen, heads, dim), row-major
  kBhsd,          ///< (batch, heads, seqlen, dim) in memory
  kQkv,           ///< q, k and v (and dq, dk and dv) interleaved in one buffer
  kPadded,        ///< gaps between heads, rows and batches
  kPacked,        ///< (total, heads, dim) with cu_seqlens, empty sequences, rows around all
  kPackedPadded,  ///< the same with gaps between heads and rows
};

enum class Alibi { kNone, kHeads, kBatchHeads };

/// The words of a tree mask: a token and its ancestors in a random tree, or random bits. Forward
/// only.
enum class Tree { kNone, kAncestors, kRandom };

/// Of every dimension or of some: what of (batch, hq, sq, sk) it has. Some of its numbers are -inf,
/// and bools are random.
enum class Bias {
  kNone,
  kAll,         ///< f32
  kHeads,       ///< the dtype of q, (1, hq, sq, sk)
  kTransposed,  ///< f16, keys outside in memory
  kKeys,        ///< bool, (batch, 1, 1, sk)
  kPairs,       ///< bool, (1, 1, sq, sk)
  kBatches,     ///< f32, (batch, 1, sq, sk)
  kShared,      ///< the dtype of q, (1, 1, sq, sk)
  kColumns,     ///< f32, (batch, hq, 1, sk)
  kRows,        ///< the dtype of q, (1, hq, sq, 1)
  kOne,         ///< f32, (1, 1, 1, 1)
};

struct Case {
  DType dtype = DType::kF32;
  int64_t batch = 1;
  int64_t sq = 64, sk = 64;  ///< packed: the longest sequence
  int64_t hq = 1, hk = 1;
  int64_t d = 64, dv = 64;
  Mask mask = {};
  Layout layout = Layout::kBshd;
  double softcap = 0;
  Alibi alibi = Alibi::kNone;
  double dropout = 0;
  bool seqused_q = false, seqused = false;  ///< seqused: of k
  bool dlse = false;
  bool sinks = false;
  Tree tree = Tree::kNone;
  Bias bias = Bias::kNone;

  bool packed() const { return layout == Layout::kPacked || layout == Layout::kPackedPadded; }
  /// "bf16_b2_q64_k65_h4x2_d64x128_causal_bhsd": unique in the list, the name in test output.
  std::string name() const;
  /// A seed of its own (FNV-1a of the name).
  uint64_t seed() const;
  /// Rough: multiply-adds of the forward pass without a mask, plus work per row.
  int64_t cost() const { return batch * (hq * sq * sk + 20 * (hq * sq + hk * sk)) * (d + dv); }
};

/// For GoogleTest.
inline void PrintTo(const Case& c, std::ostream* os) { *os << c.name(); }

/// Every pair of values of two factors occurs together in some case (where it can), every second
/// one with a gradient of LSE, plus a few hand-picked long ones, tree masks and chunks. The same
/// list on every machine.
std::vector<Case> all_cases();
/// A cheap part of it, for sanitizers and for forcing SIMD targets.
std::vector<Case> small_cases();
/// The rest.
std::vector<Case> large_cases();

}  // namespace fulgur::test
