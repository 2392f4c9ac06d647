/// Groups of processes (fulgur/distributed/group.h) for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "fulgur/distributed/plan.h"

namespace fulgur::python {

/// "contiguous", "zigzag", "by_area" or "by_page".
Distribution distribution_of(const std::string& sharding, int head_ranks, bool ring);

void register_groups(nanobind::module_& m);

}  // namespace fulgur::python
