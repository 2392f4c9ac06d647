/// Calls that are shared out to ranks: each sharding, dtype and option.
#pragma once

#include <vector>

#include "ranks.h"

namespace fulgur::test {

/// Scores of a table of heads and distances, which wants its gradient, and a mask of documents; by
/// the sequence and its lengths, too.
void add_expressions(Workload& w);

std::vector<DistributedCase> distributed_cases();

}  // namespace fulgur::test
