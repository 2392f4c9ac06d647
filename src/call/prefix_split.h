#pragma once

#include <cstdint>
#include <string>

#include "call/problem.h"

namespace fulgur {

// A call whose sequences share prefixes is divided at the ends of the prefixes (Hydragen, arXiv
// 2402.05099).

/// The problem of the same call without the information that sequences share prefixes.
Problem without_prefixes(Problem problem);

/// Why no engine divides a call; empty if engines may.
std::string undivided(const Problem& problem);

/// The problem of all rows of each group over its prefix.
Problem prefix_part(Problem problem);
/// The problem of each sequence over the keys after its group's prefix.
Problem rest_part(Problem problem);

/// The layout of the results of a part in the workspace: rows of all sequences one after the other,
/// each head at a multiple of 16 bytes.
Layout part_out(const Problem& problem);
Layout part_lse(const Problem& problem);

/// Ids of the page table, from its first to its last.
int64_t ids_of(const Problem& problem);

}  // namespace fulgur
