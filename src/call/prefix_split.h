#pragma once

#include <cstdint>
#include <string>

#include "call/problem.h"

namespace fulgur {

// A call whose sequences share prefixes is divided at their ends (Hydragen, arXiv 2402.05099).

/// The problem of a call without its prefixes, whose results are the same.
Problem without_prefixes(Problem problem);

/// Why a call is not divided, whoever computes it; empty where it may be.
std::string undivided(const Problem& problem);

/// All rows of each group over its prefix.
Problem prefix_part(Problem problem);
/// Each sequence over the keys after its group's prefix.
Problem rest_part(Problem problem);

/// Results of a part in the workspace: rows of all sequences one after the other, those of a head
/// at multiples of 16 bytes.
Layout part_out(const Problem& problem);
Layout part_lse(const Problem& problem);

/// Ids of the page table, from its first to its last.
int64_t ids_of(const Problem& problem);

}  // namespace fulgur
