/// Ranks that are not there: what one would receive is what this process has for it.
#pragma once

#include <memory>

#include "distributed/transport/transport.h"

namespace fulgur::distributed {

/// On the host and on a GPU, whose memory is copied as far as both sides go.
std::unique_ptr<Transport> simulated_ranks();

}  // namespace fulgur::distributed
