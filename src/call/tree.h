/// Tree masks: which of the last sq keys of a sequence, the tokens of its queries, a query sees.
#pragma once

#include <cstdint>

#include "call/lengths.h"

namespace fulgur {

constexpr int64_t kMaxTreeTokens = 64;  // bits of a word

inline ConstTensor tree_mask_of(const ForwardArgs& args) { return args.tree_mask; }
inline ConstTensor tree_mask_of(const ScoresArgs& args) { return args.tree_mask; }
inline ConstTensor tree_mask_of(const BackwardArgs&) { return {}; }

/// The words of a sequence's queries; null without a tree mask.
inline const uint64_t* tree_words(const Problem& p, const ConstTensor& tree_mask, int64_t b,
                                  const Sequence& s) {
  if (!p.has(Arg::kTreeMask)) return nullptr;
  const auto* words = static_cast<const uint64_t*>(tree_mask.data);
  return words + (p.packed ? s.q_begin : b * p.sq);
}

}  // namespace fulgur
