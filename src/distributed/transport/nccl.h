/// The transport over a communicator of NCCL that the caller has made.
#pragma once

#include <memory>

#include "distributed/transport/transport.h"

namespace fulgur::distributed {

/// The rank of a communicator and the number of ranks.
struct NcclPlace {
  int rank = 0, ranks = 1;
};

/// The place of `comm`, by the NCCL that has made it. Throws Error: kUnavailable
/// if this process has loaded no NCCL, kInvalidArgument for no communicator.
NcclPlace place_of_nccl(void* comm);
/// The communicator is aborted if a step takes more than `deadline` seconds.
std::unique_ptr<Transport> connect_nccl(void* comm, double deadline);

}  // namespace fulgur::distributed
