#pragma once

#include "call/problem.h"
#include "cuda/common/family.h"

namespace fulgur::cuda::papers {

/// Adds what a call by one of the papers' algorithms moves and computes to its reasons: bytes of
/// memory that its kernels read and write, before caches, multiplications of tensor cores, each
/// with an addition, exponentials and rows rescaled. tests/emulator/counts_test.cpp counts them
/// where the kernels run. Nothing is added of calls with what standard attention does not compute,
/// nor of kernels that no paper has.
void add_counts(const Problem& problem, const Candidate& candidate, Reasons* reasons);

}  // namespace fulgur::cuda::papers
