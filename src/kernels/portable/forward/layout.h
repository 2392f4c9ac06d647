// Sizes and the layout of shared memory of the portable forward kernel.
#pragma once
#include "host_device/element.h"
#include "host_device/strips.h"

namespace fulgur::kernels {

// The constants of kernel_config.h that the layout depends on.
struct PortableForwardTile {
  Operands types;
  int head_dim, value_dim, strips, block_keys, stages;
  bool q_in_registers, dropout;
};

// Bytes of buffers, and byte offsets. Tiles are panels of rows of 128 bytes, swizzled.
struct PortableForwardLayout {
  int strip_bytes;  // of Q of a strip
  int k_bytes, v_bytes;
  int q;
  int stages, stage_bytes;  // stages of K and V: the first offset, and bytes of each
  int dropout_key;
  int bytes;
};

FULGUR_SHARED PortableForwardLayout portable_forward_layout(const PortableForwardTile& tile) {
  PortableForwardLayout map = {};
  map.strip_bytes = panels_of(tile.types.q, tile.head_dim) * kStripRows * kPanelRowBytes;
  map.k_bytes = panels_of(tile.types.k, tile.head_dim) * tile.block_keys * kPanelRowBytes;
  map.v_bytes = panels_of(tile.types.v, tile.value_dim) * tile.block_keys * kPanelRowBytes;
  map.stage_bytes = map.k_bytes + map.v_bytes;
  const int q_bytes = tile.strips * map.strip_bytes;
  const int all_stages = tile.stages * map.stage_bytes;
  if (tile.q_in_registers) {  // Q is loaded by way of the last stage, during the loads of the first K and V
    map.q = all_stages - map.stage_bytes;
    map.dropout_key = max_of(all_stages, map.q + q_bytes);
  } else {
    map.stages = q_bytes;
    map.dropout_key = q_bytes + all_stages;
  }
  map.bytes = map.dropout_key + (tile.dropout ? 8 : 0);
  return map;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif
