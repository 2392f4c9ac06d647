#pragma once

#include <memory>
#include <string>

#include "call/problem.h"
#include "engine/engine.h"
#include "fulgur/attention.h"

namespace fulgur {

/// Checks the prefixes of a call that lie in host memory: that the groups cover the batch, and that
/// no prefix is longer than the keys in front of the queries of its sequences. Sequences whose
/// lengths the host cannot read count as the longest planned for, without queries. Throws
/// Error(kInvalidArgument).
void check_prefixes(const Problem& problem, const ForwardArgs& args);

/// Plans a call that reads shared prefixes once (Hydragen, arXiv 2402.05099): attention of
/// all rows of a group over its prefix, of each sequence over the keys after, and their merge.
/// Null, with the reason in `why_not`, if that is impossible or slower.
std::unique_ptr<const Executable> plan_shared_prefixes(const Problem& problem, const Engine& engine,
                                                       int threads, std::string* why_not);

}  // namespace fulgur
