// Arguments of papers/fa1_forward.cu, the same for the host and the device. kernel_config.h has the constants of
// portable/forward/params.h, with one strip, one buffer, and Q in shared memory.
#pragma once
#include "host_device/element.h"
#include "portable/forward/layout.h"
#include "portable/forward/params.h"

// O, l and m of FlashAttention make a round trip to memory for every key block. [b, hq, row tile of 64].
struct Fa1Memory {
  float* o_rows;      // O as the threads hold it: [kValueDim / 8][thread][4]
  float* statistics;  // {-m in units of log2, l} of each row
  int row_tiles;      // of the longest sequence
  int slices;         // CTAs of a head, of so many row tiles each
  int slice_tiles;
};

// What expressions need comes last: of most kernels it is nothing.
struct Fa1Params : Fa1Memory, PortableForwardParams {};

namespace fulgur::kernels {

// Bytes of shared memory: the map of one buffer of Q, K and V, then a second one of Q.
FULGUR_SHARED int fa1_second_q(const PortableForwardLayout& map) { return (map.bytes + 1023) / 1024 * 1024; }
FULGUR_SHARED int fa1_shared_bytes(const PortableForwardLayout& map) { return fa1_second_q(map) + map.strip_bytes; }

}  // namespace fulgur::kernels
