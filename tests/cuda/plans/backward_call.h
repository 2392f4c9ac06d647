/// Backward calls on cuda tensors, by the few numbers that tests vary.
#pragma once

#include "forward_call.h"

namespace fulgur::test {

/// What a backward call has with what the forward call of a shape has.
struct BackwardOptions {
  bool deterministic = false, dlse = false;
  bool dsinks = false;  ///< with the sinks of the shape
};

struct BackwardCall {
  BackwardArgs args;
  Options options;
};

/// The gradient of the forward call of a shape, of tensors without data.
inline BackwardCall backward_call(const ForwardShape& shape, const BackwardOptions& with = {}) {
  const auto [f, options, run] = forward_call(shape);
  const auto gradient = [](const ConstTensor& t) {
    return Tensor{const_cast<void*>(t.data), t.dtype, t.device, t.rank, t.shape, t.strides};
  };
  BackwardCall call{{.dout = f.out,
                     .q = f.q,
                     .k = f.k,
                     .v = f.v,
                     .out = f.out,
                     .lse = f.lse,
                     .dq = gradient(f.q),
                     .dk = gradient(f.k),
                     .dv = gradient(f.v),
                     .alibi_slopes = f.alibi_slopes,
                     .lengths = f.lengths,
                     .sinks = f.sinks,
                     .bias = f.bias},
                    options};
  if (with.dlse) call.args.dlse = f.lse;
  if (with.dsinks) call.args.dsinks = gradient(f.sinks);
  call.options.deterministic = with.deterministic;
  return call;
}

inline Problem backward_problem(const ForwardShape& shape, const BackwardOptions& with = {}) {
  const BackwardCall call = backward_call(shape, with);
  return make_problem(call.args, call.options);
}

}  // namespace fulgur::test
