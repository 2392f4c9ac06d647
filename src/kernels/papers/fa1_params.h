// Arguments of papers/fa1_forward.cu, the same for the host and the device. kernel_config.h has the constants of
// portable/forward/params.h, with one strip, one stage, and Q in shared memory.
#pragma once
#include "host_device/element.h"
#include "portable/forward/layout.h"
#include "portable/forward/params.h"

// O, l and m in memory, between two key blocks: [b, hq, row tile of 64].
struct Fa1Memory {
  float* o_rows;      // O as the threads hold it: [kValueDim / 8][thread][4]
  float* statistics;  // {-m in units of log2, l} of each row
  int row_tiles;      // of the longest sequence
  int slices;         // CTAs per head
  int slice_tiles;    // row tiles per CTA
};

// The arguments of expressions come last; most kernels have none.
struct Fa1Params : Fa1Memory, PortableForwardParams {};

namespace fulgur::kernels {

// Shared memory: the map of the portable forward kernel, with one buffer each of Q, K and V, then a second buffer of Q.
FULGUR_SHARED int fa1_second_q(const PortableForwardLayout& map) { return (map.bytes + 1023) / 1024 * 1024; }
FULGUR_SHARED int fa1_shared_bytes(const PortableForwardLayout& map) { return fa1_second_q(map) + map.strip_bytes; }

}  // namespace fulgur::kernels
