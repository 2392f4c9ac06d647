#pragma once

#include <string>
#include <vector>

#include "distributed/transport/socket.h"

namespace fulgur::distributed {

/// The connections of a rank to another one.
struct Peer {
  Socket data, control;
  bool silent = false;  ///< the control connection has ended
};

/// Connects this rank with all others by way of rank 0, which listens at the host and the port.
/// Returns the connections to each rank. Throws Error(kUnavailable) if some rank does not come
/// within `deadline` seconds.
std::vector<Peer> rendezvous(int rank, int ranks, const std::string& host, int port,
                             double deadline);

}  // namespace fulgur::distributed
