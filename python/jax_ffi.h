/// The handlers of fulgur.jax's calls: what XLA runs for fulgur_forward, fulgur_backward,
/// fulgur_append and fulgur_append_forward.
#pragma once

#include "xla_ffi.h"

namespace fulgur::python {

struct JaxHandler {
  const char* target;    ///< the name of the call
  const char* platform;  ///< as XLA names it
  const char* stage;     ///< of XLA's execution
  xla::Handler* handler;
};

/// All that fulgur/jax.py registers. Nothing of JAX is needed to build: xla_ffi.h says what XLA
/// hands over.
inline constexpr int kJaxHandlers = 12;
const JaxHandler (&jax_handlers())[kJaxHandlers];

}  // namespace fulgur::python
