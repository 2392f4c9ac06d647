/// A transport that simulates the other ranks: this process receives what it sends to them.
#pragma once

#include <memory>

#include "distributed/transport/transport.h"

namespace fulgur::distributed {

/// For host memory and GPU memory. Copies as many bytes as both the message and the buffer have.
std::unique_ptr<Transport> simulated_ranks();

}  // namespace fulgur::distributed
