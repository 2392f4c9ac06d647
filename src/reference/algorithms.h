/// The attention algorithms of the papers, one file each; docs/algorithms.md explains them.
/// `dout` are the gradients of O and LSE; M is the size of the fast memory in elements (M >= 1),
/// from which the block sizes follow; `traffic`, if given, is increased by the elements moved.
#pragma once

#include <cstdint>
#include <vector>

#include "fulgur/scores.h"
#include "reference/head.h"

namespace fulgur::reference {

// standard.cpp: S and P are written to slow memory. FlashAttention, Alg. 0 and Alg. 3.
Forward standard_forward(const Head& h, Traffic* traffic = nullptr);
Backward standard_backward(const Head& h, const OutputGradient& dout, Traffic* traffic = nullptr,
                           const BiasGradient& dbias = {});

// memory_efficient.cpp: the softmax normalizer first, then one row of O at a time: O(N) memory.
// FlashAttention, Appendix B.1 and B.2. The backward pass takes what the forward pass returned.
Forward memory_efficient_forward(const Head& h, Traffic* traffic = nullptr);
Backward memory_efficient_backward(const Head& h, const Forward& forward,
                                   const OutputGradient& dout, Traffic* traffic = nullptr);

/// What FlashAttention keeps of the forward pass. LSE = m + log(l).
struct Flash1Forward {
  std::vector<double> o /*[sq, dv]*/, l /*[sq]*/, m /*[sq]*/;
};

// flash1.cpp: K/V outer loop, O, l and m make a round trip per block. FlashAttention, Alg. 2 and 4.
Flash1Forward flash1_forward(const Head& h, int64_t M, Traffic* traffic = nullptr);
Backward flash1_backward(const Head& h, const Flash1Forward& forward, const OutputGradient& dout,
                         int64_t M, Traffic* traffic = nullptr);

// flash2.cpp: Q outer loop, O unscaled until the end, LSE only. FlashAttention-2, Alg. 1 and 2.
Forward flash2_forward(const Head& h, int64_t M, Traffic* traffic = nullptr);
/// The same over the keys [key_begin, key_end) alone, without the sink.
Forward flash2_forward_keys(const Head& h, int64_t key_begin, int64_t key_end, int64_t M,
                            Traffic* traffic = nullptr);
Backward flash2_backward(const Head& h, const Forward& forward, const OutputGradient& dout,
                         int64_t M, Traffic* traffic = nullptr, const BiasGradient& dbias = {});

// scores.cpp: a row of S or of P at a time, as attention never keeps it.
/// What of a rule makes the scores of a stage.
Rule rule_until(ScoreStage stage, const Rule& rule);
/// Row i of a head with such a rule: [sk].
void score_row(const Head& h, ScoreStage stage, int64_t i, double* row);

// split_kv.cpp: the keys in `splits` >= 1 parts, each by FlashAttention-2, combined by their LSE.
// FlashAttention-3's split-KV.
Forward split_kv_forward(const Head& h, int64_t splits, int64_t M, Traffic* traffic = nullptr);
/// Exact attention over the union of disjoint sets of keys, at least one.
Forward combine(const std::vector<Forward>& parts, Traffic* traffic = nullptr);

}  // namespace fulgur::reference
