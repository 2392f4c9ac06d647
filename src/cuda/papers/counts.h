#pragma once

#include "call/problem.h"
#include "cuda/common/family.h"

namespace fulgur::cuda::papers {

/// Adds the counts of a call by one of the papers' algorithms to its reasons: bytes that its
/// kernels read and write, without caches, multiply-adds of tensor cores, exponentials, and
/// rescaled rows. tests/emulator/counts_test.cpp compares them with counts of running kernels.
/// Calls that standard attention does not compute have no counts, nor have kernels of no paper.
void add_counts(const Problem& problem, const Candidate& candidate, Reasons* reasons);

}  // namespace fulgur::cuda::papers
