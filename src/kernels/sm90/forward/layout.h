// Sizes and the map of shared memory of the Hopper forward kernel.
#pragma once
#include "host_device/element.h"
#include "host_device/key_walk.h"
#include "attention/bias_tile.h"

namespace fulgur::kernels {

enum : int {
  kStripPanelBytes = kStripRows * kPanelRowBytes,
  kControlBytes = 1024,  // for barriers and views
  kSwizzleBytes = 1024,  // after which it repeats: buffers begin at multiples of them
};

// What the map depends on: constants of kernel_config.h.
struct ForwardTile {
  Operands types;
  int head_dim, value_dim, consumers, block_keys, q_stages, k_stages, v_stages;
  int bias = 0;  // 1 + its element type; 0: there is none, or bits of a mask
  bool bias_rows = false;
  bool pairs = false;  // a buffer of K and one of V have their barriers together
  bool maps_tiles = false;
  bool mask_bits = false;
};

// What the codes of a q tile's head are multiplied by (attention/descale.cuh), and its kv head, counted over the batch.
struct alignas(16) HeadOfCodes {
  float of_products, of_scores;  // ProductScale
  float of_values;
  int kv_head;
};

// Bytes of buffers, and byte offsets from a base aligned to 1024.
struct ForwardLayout {
  int strip_bytes;  // of one warpgroup: Q, and later O where TMA stores it from there
  int q_bytes, k_bytes, v_bytes;
  int bias;              // in a buffer of K: the bias, or words of a mask, of each warpgroup, or of all together
  int strip_bias_bytes;  // from a warpgroup's to the next one's
  int q, k, v;
  int q_full, q_empty, k_full, k_empty, v_full, v_empty;  // a barrier of 8 bytes each stage
  int v_tail;
  int view;  // one View per Q buffer and consumer
  int last;  // one int per consumer: whether its split is the last to finish
  int dropout_key;
  int tile_info;  // with a map a TileInfo per K buffer
  int ordered, order;  // with a map by strips: a barrier, and the order of blocks (maps/block_order.cuh)
  int head;  // with codes a HeadOfCodes per Q buffer
  int end, bytes;
};

// Keys of a segment, for each of which V has a mean (sm90/forward/values.cuh): about 1536, in whole tiles.
FULGUR_SHARED int segment_keys(int block_keys) { return 1536 / block_keys * block_keys; }

// Means of segments as steps of a product: bf16, in panels of 64 columns (sm90/forward/values.cuh).
enum : int { kSegmentsOfStep = 4, kRowsOfMean = 4 };
FULGUR_SHARED int mean_step_bytes(int value_dim) {
  return panels_of(kBF16, value_dim) * kSegmentsOfStep * kRowsOfMean * kPanelRowBytes;
}
FULGUR_SHARED int mean_steps_of_segments(int segments) {
  return (segments + kSegmentsOfStep - 1) / kSegmentsOfStep;
}

// Warps of sm90/forward/values.cu have 128 keys of 32 columns each: shared memory for their image, and for two sums of
// each column.
enum : int { kValuesThreads = 384, kValuesWarpKeys = 128, kValuesWarpBytes = kValuesWarpKeys * 32 + 2 * 32 * 4 };
FULGUR_SHARED int values_warps(int keys, int block_keys) {
  return (min_of(keys, segment_keys(block_keys)) + kValuesWarpKeys - 1) / kValuesWarpKeys;
}

// With a map by strips the blocks of the last rounds, of a block for each CTA, are sorted (maps/block_order.cuh).
enum : int { kSortedRounds = 4 };
// One for each consumer thread.
FULGUR_SHARED int max_sorted_blocks(int consumers) { return consumers > 1 ? 128 * consumers : 0; }

FULGUR_SHARED ForwardLayout forward_layout(const ForwardTile& tile) {
  ForwardLayout map = {};
  const int o_panels = tile.q_stages > 1 && tile.types.v != kE4M3 ? panels_of(tile.types.o, tile.value_dim) : 0;
  map.strip_bytes = kStripPanelBytes * max_of(panels_of(tile.types.q, tile.head_dim), o_panels);
  map.q_bytes = tile.consumers * map.strip_bytes;
  map.k_bytes = panels_of(tile.types.k, tile.head_dim) * tile.block_keys * kPanelRowBytes;
  map.bias = map.k_bytes;
  const int bias_tile_bytes =
      tile.mask_bits ? mask_words(tile.block_keys) * kMaskThreads * int(sizeof(u32))
                     : bias_panels(tile.bias, tile.block_keys) * bias_panel_bytes(tile.bias_rows, kStripRows);
  map.strip_bias_bytes = tile.bias_rows ? bias_tile_bytes : 0;
  map.k_bytes += (tile.bias_rows ? tile.consumers * bias_tile_bytes : bias_tile_bytes) + kSwizzleBytes - 1;
  map.k_bytes -= map.k_bytes % kSwizzleBytes;
  map.v_bytes = tile.types.v == kE4M3 ? tile.value_dim * tile.block_keys  // an image of steps (sm90/forward/values.cuh)
                                      : panels_of(tile.types.v, tile.value_dim) * tile.block_keys * kPanelRowBytes;
  map.q = 0;
  map.k = map.q + tile.q_stages * map.q_bytes;
  map.v = map.k + tile.k_stages * map.k_bytes;
  map.q_full = map.v + tile.v_stages * map.v_bytes;
  map.q_empty = map.q_full + 8 * tile.q_stages;
  map.k_full = map.q_empty + 8 * tile.q_stages;
  map.k_empty = map.k_full + 8 * tile.k_stages;
  map.v_full = tile.pairs ? map.k_full : map.k_empty + 8 * tile.k_stages;
  map.v_empty = tile.pairs ? map.k_empty : map.v_full + 8 * tile.v_stages;
  map.v_tail = map.v_empty + 8 * tile.v_stages;
  map.view = (map.v_tail + 8 + 15) / 16 * 16;
  map.last = map.view + int(sizeof(View)) * tile.q_stages * tile.consumers;
  map.dropout_key = (map.last + 4 * tile.consumers + 7) / 8 * 8;
  map.tile_info = (map.dropout_key + 8 + 15) / 16 * 16;
  map.head = map.tile_info + (tile.maps_tiles ? int(sizeof(TileInfo)) * tile.k_stages : 0);
  map.ordered = map.head + (tile.types.q == kE4M3 ? int(sizeof(HeadOfCodes)) * tile.q_stages : 0);
  const int sorted = tile.maps_tiles && !tile.mask_bits ? max_sorted_blocks(tile.consumers) : 0;
  map.order = map.ordered + (sorted > 0 ? 8 : 0);
  map.end = map.order + 2 * sorted;
  map.bytes = map.q_full + kControlBytes + 2 * sorted;
  return map;
}

}  // namespace fulgur::kernels
