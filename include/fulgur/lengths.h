#pragma once

#include "fulgur/tensor.h"

namespace fulgur {

/// The lengths of the sequences of a call, where not all are alike. Each tensor lies on the device
/// of q or in host memory, where each run reads and checks it; it may change once the run has
/// returned, and a graph keeps the lengths of its capture.
struct VarLen {
  /// Packed layout: i32 (batch + 1), non-decreasing, first >= 0, last <= total. Both or none, but q
  /// may be packed alone where K and V lie in caches. Sequence b is rows cu_seqlens[b] ..
  /// cu_seqlens[b+1]-1. Rows before the first sequence and after the last one are padding, as are
  /// those that seqused_q and seqused_k leave between them.
  ConstTensor cu_seqlens_q{}, cu_seqlens_k{};
  /// i32 (batch): only the first seqused_q[b] queries of sequence b exist. Its rows begin where
  /// they do without; those after are padding, with out = 0 and lse = -inf.
  ConstTensor seqused_q{};
  ConstTensor seqused_k{};  ///< i32 (batch): only the first seqused_k[b] keys of sequence b exist
};

}  // namespace fulgur
