#pragma once

#include "call/lengths.h"

namespace fulgur {

// Writes the results of rows that belong to no sequence, for tensors in host memory: packed rows
// after the last sequence, and queries past seqused_q, get out = 0, lse = -inf and zero gradients;
// keys past seqused_k get dk = dv = 0.

void write_padding(const Problem& problem, const Sequences& sequences, const ForwardArgs& args);
void write_padding(const Problem& problem, const Sequences& sequences, const BackwardArgs& args);

}  // namespace fulgur
