#pragma once

#include <string>

#include "call/problem.h"

namespace fulgur::cuda::decode {

/// Why Hopper's decode kernels (docs/kernels/decode.md) do not compute a forward problem, and what
/// they do compute; empty when they compute it.
std::string decode_rejects(const Problem& problem);
/// The same for the decode kernels' part of a problem that takes_both(), and on cards whose forward
/// kernel multiplies no codes.
std::string decode_rejects_few(const Problem& problem);

}  // namespace fulgur::cuda::decode
