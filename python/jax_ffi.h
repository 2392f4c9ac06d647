/// The handlers of fulgur.jax's calls: what XLA runs for fulgur_forward, fulgur_backward,
/// fulgur_append and fulgur_append_forward.
#pragma once

#include <string>
#include <vector>

#include "xla_ffi.h"

namespace fulgur::python {

struct JaxHandler {
  const char* target;    ///< the name of the call
  const char* platform;  ///< as XLA names it
  const char* stage;     ///< of XLA's execution
  xla::Handler* handler;
};

/// The names of the tensors of a call, in the order of its operands and of its results, as if it
/// had them all.
struct JaxCall {
  const char* target;
  std::vector<std::string> operands{}, results{};
};
std::vector<JaxCall> jax_calls();

/// All that fulgur/jax/_handlers.py registers. Nothing of JAX is needed to build: xla_ffi.h says
/// what XLA hands over.
inline constexpr int kJaxHandlers = 12;
const JaxHandler (&jax_handlers())[kJaxHandlers];

}  // namespace fulgur::python
