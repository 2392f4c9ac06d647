#pragma once

#include "call/problem.h"
#include "cuda/common/kernel_key.h"

namespace fulgur::cuda {

// Which sequences of an invariant call decode kernels compute, and which the forward kernel.

/// Rows of a kv head, (query, head of its group), that a block of an invariant decode call has.
inline constexpr int64_t kFewRows = 64;

/// Whether each sequence of a forward pass has the kernel that its own rows ask for, as in
/// invariant calls on contiguous keys that both compute, which are no codes: a decode kernel, which
/// splits its keys, where it has up to kFewRows, and the forward kernel where it has more. Which
/// the longest one is depends on the batch.
bool rows_decide(const Problem& problem);
/// The most queries of a sequence that a decode kernel computes then; 0: it computes none.
int64_t few_queries(const Problem& problem);
/// Queries of the longest sequence, or of the longer one that it is a part of: these decide.
int64_t deciding_queries(const Problem& problem);
/// Whether a decode kernel computes some sequences of one call and the forward kernel others, as
/// lengths say.
bool takes_both(const Problem& problem);

/// What a problem fixes of the text of the forward and decode kernels that share calls so.
AnyForwardKey forward_key_by_rows(const Problem& problem);

}  // namespace fulgur::cuda
