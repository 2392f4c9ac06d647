// The random numbers that the dropout of a call uses.
#pragma once

#include <cstdint>

#include "call/problem.h"
#include "kernels/host_device/dropout.h"

namespace fulgur {

/// The index of q head h of sequence b among all heads of all sequences, which its random numbers
/// depend on.
inline uint64_t dropout_head(const Problem& p, int64_t b, int64_t h) {
  const Origin& o = p.origin;
  return static_cast<uint64_t>(o == Origin{} ? b * p.hq + h : (o.batch + b) * o.heads + o.head + h);
}

/// The dropout mask of a call whose tensors lie in host memory: by the values of rng_state, if the
/// call has one, or by the run.
template <class Args>
kernels::DropoutMask dropout_of(const Problem& p, const Args& args, const Run& run) {
  uint64_t seed = run.dropout_seed, offset = run.dropout_offset;
  if constexpr (requires { args.rng_state; }) {
    if (p.has(Arg::kRngState)) {
      const auto* state = static_cast<const int64_t*>(args.rng_state.data);
      seed = static_cast<uint64_t>(state[0]);
      offset = static_cast<uint64_t>(state[1]);
    }
  }
  return kernels::dropout_mask(kernels::dropout_threshold(p.dropout_p), seed, offset);
}

}  // namespace fulgur
