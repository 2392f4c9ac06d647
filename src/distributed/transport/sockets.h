/// The transport over sockets between all processes of a group.
#pragma once

#include <memory>
#include <string>

#include "distributed/transport/transport.h"

namespace fulgur::distributed {

/// Connects to all other ranks by way of rank 0, which listens at host and port. Throws
/// Error(kUnavailable) if they do not connect within `deadline` seconds. Each later step may be
/// without progress for as long.
std::unique_ptr<Transport> connect_sockets(int rank, int ranks, const std::string& host, int port,
                                           double deadline);

}  // namespace fulgur::distributed
