#pragma once

#include <memory>
#include <string>

#include "call/problem.h"
#include "engine/engine.h"
#include "fulgur/attention.h"

namespace fulgur {

/// Checks the prefixes of a call that lie in the host's memory: groups that cover the batch, and
/// lengths that each sequence of a group has in front of its queries' own keys. Lengths of
/// sequences that the host cannot read count as the longest planned for, queries as none. Throws
/// Error(kInvalidArgument).
void check_prefixes(const Problem& problem, const ForwardArgs& args);

/// Plans a call that reads shared prefixes once (Hydragen, arXiv 2402.05099): attention of
/// all rows of a group over its prefix, of each sequence over the keys after, and their merge.
/// Null where that cannot be or does not pay; `why_not` then says so.
std::unique_ptr<const Executable> plan_shared_prefixes(const Problem& problem, const Engine& engine,
                                                       int threads, std::string* why_not);

}  // namespace fulgur
