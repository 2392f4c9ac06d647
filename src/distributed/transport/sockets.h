/// Sockets between all processes of a group.
#pragma once

#include <memory>
#include <string>

#include "distributed/transport/transport.h"

namespace fulgur::distributed {

/// Meets the others at rank 0, which listens at host and port. Throws Error(kUnavailable) where
/// they do not come within `deadline` seconds, as long as each later step may make no progress.
std::unique_ptr<Transport> connect_sockets(int rank, int ranks, const std::string& host, int port,
                                           double deadline);

}  // namespace fulgur::distributed
