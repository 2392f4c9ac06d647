// Layouts of shared memory of the Hopper backward kernels.
//
// kernel_config.h has the constants of backward/params.h, and
//   kConsumers      consumer warpgroups: 2, or 1 in short calls. Br is 64 or 128, in keys_wide.cu 64. Bc is 64 for each
//                   consumer warpgroup in keys.cu, and 64 for both in keys_wide.cu
//   kKStages        stages of K; with two, a key block begins while the last products of the previous one run
//   kQStages, kOStages, kDsStages, kDqStages    stages of Q with LSE, of dO with D, of dS, and of dQ; 0 if there
//                   are none
//   kHalfP          1: for bf16 inputs keys_wide.cu passes P between warpgroups as f16, which has three more bits
//   kRowTiles       tiles of 64 rows of dQ that a consumer warpgroup of rows.cu holds
//   kRowStages      stages of dS and K in rows.cu
//   kProducerRegisters, kConsumerRegisters, kDqRegisters    registers per thread after setmaxnreg
#pragma once
#include "host_device/element.h"
#include "backward/work.h"
#include "attention/bias_tile.h"

namespace fulgur::kernels {

enum : int { kBackwardPanelBytes = 64 * kPanelRowBytes };  // 64 rows of a panel

// The panels of K or V that keys_wide.cu holds in registers.
FULGUR_SHARED int panels_in_registers(Element type, int dim) { return min_of(panels_of(type, dim), 2); }

// The constants of kernel_config.h that the layouts depend on.
struct BackwardTile {
  Operands types;
  int head_dim, value_dim, consumers, block_rows, block_keys, k_stages, q_stages, o_stages, ds_stages, row_tiles;
  int row_stages, dq_stages;
  bool mask_bits = false;
  int bias = 0;  // 1 + its element type; 0: there is none, or bits of a mask
  bool bias_rows = false;
};

// A key block, which the producer stores for the consumers with each work tile.
struct KeyBlock {
  int block;  // its index in its sequence; < 0: no more work
  int head;   // kv head * splits + split
  int batch;
  int state;  // bits of KeyBlockState
};
enum KeyBlockState : int {
  kHasSteps = 1,       // some row of the work tile sees its keys
  kLoadsPartial = 2,   // dK and dV begin with what an earlier wave, or the first part of the block, has stored
  kStoresPartial = 4,  // dK and dV are stored for a later wave, the second part of the block, or reduce.cu
  kNextIsHigher = 8,   // the blocks of this head are taken in ascending order
  kFirstPart = 16,     // first part of a cut block: second parts wait until its partial dK and dV are stored
};

// A step of a key block: a row tile of a q head.
struct Step {
  int tile;   // with stored dS: its score tile; otherwise its row tile, counted over all q heads
  int row;    // its first row in the sequence
  int head;   // kExpressions or kMapsTiles: the q head; else the bits of its slope, in units of log2, kAlibi
  int state;  // bits of StepState
};
enum StepState : int {
  kMasked = 1,        // the bounds of the call hide some key from some row
  kLastStep = 2,      // of its work tile
  kCounted = 4,       // kRoundsDq: the additions of the steps so far are counted after it
  kModHides = 8,      // mask_mod hides some key from some row
  kHeadOfSplit = 16,  // with dropout, without a map: times the number of the q head in its split
  kBlockBefore = 16,  // kMapsTiles and kOrderedDq: times 1 + the key block that adds to its dQ before; 0: none does
};

// The places of the mask words of a step and of the next one, for the first 64 keys of the key block; -1 if the mask
// hides nothing there, or there is no step.
struct MaskPlaces {
  int here, next;
};

// What is done with a dQ tile, kRoundsDq.
enum : int {
  kStays = 1,  // it is not added to dq_accum, but rounded with what is there, kKeepsDq; or else 0 or kCounted
};

// A dQ tile (64 rows of a panel) in shared memory, which is added to dq_accum.
struct DqTile {
  int tile;   // its index in dq_accum; < 0: no more work
  int block;  // kOrderedDq: the semaphore at its turn; kRoundsDq: what is done with the tile
  int next;   // kOrderedDq: the semaphore after it; kRoundsDq: the additions that complete its 64 rows
  int bytes;
};

// Sizes in bytes, and byte offsets from a base aligned to 1024.
struct KeysLayout {
  int k_bytes, v_bytes, q_bytes, o_bytes, p_bytes;  // of one stage
  int bias;                                         // in a stage of Q
  int ds_bytes;                                     // of one stage and 64 keys
  int k, v, q, o, p, ds, dq;                        // o: dO
  int shift, delta;                                 // statistics of a row tile, one for each stage of Q and of dO
  int step, ds_step;                                // a Step for each stage of Q and of dS
  int block;                                        // a KeyBlock for each stage of K
  int dq_tile;                                      // a DqTile for each stage of dQ
  int k_full, k_empty, v_full, v_empty, q_full, q_empty, o_full, o_empty, tail;
  int dropout_key;
  int mask;      // kMaskBits: a MaskPlaces for each stage of Q
  int complete;  // kRoundsDq: a word for each stage of dQ, of bits of the 64 rows that its warp has completed
  int bytes;
};

// The layout with the given panels of K and V and stages of P in shared memory.
FULGUR_SHARED KeysLayout keys_layout_of(const BackwardTile& tile, int k_panels, int v_panels, int p_stages) {
  KeysLayout map = {};
  map.k_bytes = k_panels * tile.block_keys * 128;
  map.v_bytes = v_panels * tile.block_keys * 128;
  map.bias = panels_of(tile.types.q, tile.head_dim) * tile.block_rows * 128;
  map.q_bytes =
      map.bias + bias_panels(tile.bias, tile.block_keys) * bias_panel_bytes(tile.bias_rows, tile.block_rows);
  map.o_bytes = panels_of(tile.types.o, tile.value_dim) * tile.block_rows * 128;
  map.p_bytes = 2 * tile.block_rows * tile.block_keys;
  map.ds_bytes = tile.block_rows / kDsTileRows * kDsTileBytes;
  map.k = 0;
  map.v = map.k + tile.k_stages * map.k_bytes;
  map.q = map.v + map.v_bytes;
  map.o = map.q + tile.q_stages * map.q_bytes;
  map.p = map.o + tile.o_stages * map.o_bytes;
  map.ds = map.p + p_stages * map.p_bytes;
  map.dq = map.ds + tile.ds_stages * (tile.block_keys / kDsTileKeys) * map.ds_bytes;
  map.shift = map.dq + tile.dq_stages * 4 * kDqTileFloats;
  map.delta = map.shift + 4 * tile.block_rows * tile.q_stages;
  map.step = map.delta + 4 * tile.block_rows * tile.o_stages;
  map.ds_step = map.step + int(sizeof(Step)) * tile.q_stages;
  map.block = map.ds_step + int(sizeof(Step)) * tile.ds_stages;
  map.dq_tile = map.block + int(sizeof(KeyBlock)) * tile.k_stages;
  map.k_full = map.dq_tile + int(sizeof(DqTile)) * tile.dq_stages;
  map.k_empty = map.k_full + 8 * tile.k_stages;
  map.v_full = map.k_empty + 8 * tile.k_stages;
  map.v_empty = map.v_full + 8;
  map.q_full = map.v_empty + 8;
  map.q_empty = map.q_full + 8 * tile.q_stages;
  map.o_full = map.q_empty + 8 * tile.q_stages;
  map.o_empty = map.o_full + 8 * tile.o_stages;
  map.tail = map.o_empty + 8 * tile.o_stages;
  map.dropout_key = map.tail + 8;
  map.complete = map.dropout_key + 8;
  map.mask = (map.complete + 4 * tile.dq_stages + 7) / 8 * 8;
  map.bytes = tile.mask_bits ? map.mask + int(sizeof(MaskPlaces)) * tile.q_stages : map.complete + 4 * tile.dq_stages;
  return map;
}

// The layout of keys.cu, in which P stays in registers.
FULGUR_SHARED KeysLayout keys_layout(const BackwardTile& tile) {
  return keys_layout_of(tile, panels_of(tile.types.k, tile.head_dim), panels_of(tile.types.v, tile.value_dim), 0);
}

// The layout of keys_wide.cu: two stages of P, and the panels of K and V that registers do not hold.
FULGUR_SHARED KeysLayout keys_wide_layout(const BackwardTile& tile) {
  const Element k = tile.types.k;
  const Element v = tile.types.v;
  return keys_layout_of(tile, panels_of(k, tile.head_dim) - panels_in_registers(k, tile.head_dim),
                        panels_of(v, tile.value_dim) - panels_in_registers(v, tile.value_dim), 2);
}

// The layout of bias_gradient.cu: a buffer of Q and dO, and buffers of K, V and the bias.
struct BiasGradientLayout {
  int q_panels, o_panels, k_panels, v_panels;
  int row_bytes, key_bytes;  // of a buffer
  int dout;                  // in a buffer of rows
  int v, bias;               // in a buffer of keys
  int strip_bias_bytes;      // of 64 rows, if each query has a row of it
  int stages;                // buffers of keys: two if they fit
  int q, k;
  int rows_full, rows_empty, keys_full, keys_empty, scratch, dropout_key;
  int bytes;
};

FULGUR_SHARED BiasGradientLayout bias_gradient_layout(const BackwardTile& tile) {
  constexpr int kMaxBytes = 227 * 1024;
  BiasGradientLayout map = {};
  map.q_panels = panels_of(tile.types.q, tile.head_dim);
  map.o_panels = panels_of(tile.types.o, tile.value_dim);
  map.k_panels = panels_of(tile.types.k, tile.head_dim);
  map.v_panels = panels_of(tile.types.v, tile.value_dim);
  map.dout = map.q_panels * tile.block_rows * kPanelRowBytes;
  map.row_bytes = map.dout + map.o_panels * tile.block_rows * kPanelRowBytes;
  map.v = map.k_panels * tile.block_keys * kPanelRowBytes;
  map.bias = map.v + map.v_panels * tile.block_keys * kPanelRowBytes;
  const int bias_bytes = bias_panels(tile.bias, tile.block_keys) * bias_panel_bytes(tile.bias_rows, 64);
  map.strip_bias_bytes = tile.bias_rows ? bias_bytes : 0;
  map.key_bytes = map.bias + (tile.bias_rows ? tile.consumers : 1) * bias_bytes;
  map.q = 0;
  map.k = map.row_bytes;
  const int rest = 4 * tile.consumers * tile.block_keys * 4 + 64;  // sums of warps, barriers, the key
  map.stages = map.k + 2 * map.key_bytes + rest <= kMaxBytes ? 2 : 1;
  map.scratch = map.k + map.stages * map.key_bytes;
  map.rows_full = map.scratch + 4 * tile.consumers * tile.block_keys * 4;
  map.rows_empty = map.rows_full + 8;
  map.keys_full = map.rows_empty + 8;
  map.keys_empty = map.keys_full + 8 * map.stages;
  map.dropout_key = map.keys_empty + 8 * map.stages;
  map.bytes = map.dropout_key + 8;
  return map;
}

// A row block, which the producer of rows.cu stores for the consumers.
struct RowBlock {
  int row;  // its first row; < 0: no more work
  int head, batch;
  int steps;  // of 64 keys
};

// The layout of rows.cu.

struct RowsLayout {
  int ds_bytes, k_bytes, stage_bytes;
  int stages;  // each: dS tiles, then K
  int block;   // a RowBlock
  int full, empty, block_full, block_empty, tail;
  int bytes;
};

FULGUR_SHARED RowsLayout rows_layout(const BackwardTile& tile) {
  RowsLayout map = {};
  map.ds_bytes = tile.consumers * tile.row_tiles * kDsTileBytes;
  map.k_bytes = panels_of(tile.types.k, tile.head_dim) * kBackwardPanelBytes;
  map.stage_bytes = map.ds_bytes + map.k_bytes;
  map.stages = 0;
  map.block = map.stages + tile.row_stages * map.stage_bytes;
  map.full = map.block + int(sizeof(RowBlock));
  map.empty = map.full + 8 * tile.row_stages;
  map.block_full = map.empty + 8 * tile.row_stages;
  map.block_empty = map.block_full + 8;
  map.tail = map.block_empty + 8;
  map.bytes = map.tail + 8;
  return map;
}

}  // namespace fulgur::kernels
