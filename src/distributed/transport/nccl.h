/// A communicator of NCCL, which the caller has made.
#pragma once

#include <memory>

#include "distributed/transport/transport.h"

namespace fulgur::distributed {

/// What a communicator is among all: rank 0 to ranks - 1.
struct NcclPlace {
  int rank = 0, ranks = 1;
};

/// By the library that has made `comm`, which this process has loaded. Throws Error: kUnavailable
/// where there is none, kInvalidArgument.
NcclPlace place_of_nccl(void* comm);
/// A step that takes more than `deadline` seconds is the end of the communicator: it is aborted.
std::unique_ptr<Transport> connect_nccl(void* comm, double deadline);

}  // namespace fulgur::distributed
