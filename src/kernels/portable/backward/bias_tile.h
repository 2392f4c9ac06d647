// The layout of shared memory of the portable kernel of dbias (portable/backward/bias_gradient.cu).
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

enum : int {
  kPortableBiasTile = 64,      // queries and keys of a tile
  kPortableBiasColumns = 256,  // the maximum of columns of a tile in shared memory at a time
};

struct PortableBiasLayout {
  int keys;  // K or V, after Q or dO
  int scratch, dropout_key, bytes;
};

FULGUR_SHARED PortableBiasLayout portable_bias_layout(const Operands& types, int head_dim, int value_dim) {
  const int panels = max_of(panels_of(types.q, min_of(head_dim, kPortableBiasColumns)),
                            panels_of(types.v, min_of(value_dim, kPortableBiasColumns)));
  PortableBiasLayout map = {};
  map.keys = panels * kPortableBiasTile * kPanelRowBytes;
  map.scratch = 2 * map.keys;
  map.dropout_key = map.scratch + 4 * kPortableBiasTile * int(sizeof(float));
  map.bytes = map.dropout_key + 8;
  return map;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif
