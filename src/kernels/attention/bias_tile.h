// Sizes of tiles of a dense bias in shared memory (attention/bias_tile.cuh). `bias`: 1 + its element type, 0 where
// there is none.
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

FULGUR_SHARED int bias_bytes(int bias) { return bias == 0 ? 0 : bias == 1 + kBool ? 1 : bias == 1 + kF32 ? 4 : 2; }

// Bytes of a panel of `rows` queries. Where all queries have the same bias, a panel has one row, and takes as many
// bytes as the swizzle repeats itself after.
FULGUR_SHARED int bias_panel_bytes(bool of_rows, int rows) { return of_rows ? rows * kPanelRowBytes : 1024; }

FULGUR_SHARED int bias_panels(int bias, int keys) {
  return (keys * bias_bytes(bias) + kPanelRowBytes - 1) / kPanelRowBytes;
}

// Whether the consumers of the Hopper forward kernel load the words of a tile into registers: three warpgroups do.
FULGUR_SHARED bool bias_in_registers(int bias, int consumers) { return bias_bytes(bias) == 2 && consumers == 3; }

// Whether these registers are those of the P that is not being multiplied. With narrow heads that was slower.
FULGUR_SHARED bool bias_in_p(int bias, int consumers, int value_dim) {
  return bias_in_registers(bias, consumers) && value_dim > 64;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif
