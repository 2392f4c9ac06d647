// Maps of shared memory of the kernels of the Hopper backward pass.
#pragma once
#include "sm90/backward/work.h"

namespace fulgur::kernels {

enum : int { kBackwardPanelBytes = 64 * 128 };  // 64 rows of a panel of 64 columns, swizzled

FULGUR_SHARED int panels_of_columns(int dim) { return (dim + 63) / 64; }

// Panels of K or V that sm90/backward/keys_wide.cu holds in registers.
FULGUR_SHARED int panels_in_registers(int dim) { return min_of(panels_of_columns(dim), 2); }

// What the maps depend on: constants of kernel_config.h.
struct BackwardTile {
  int head_dim, value_dim, consumers, block_rows, block_keys, k_stages, q_stages, o_stages, ds_stages, row_tiles;
  int row_stages, sums_stages;
};

enum : int {
  kUnitFloats = 64 * 64,   // of dQ that leave at once, at most
  kFirstTurn = 1 << 30,  // with the block that adds first, and so stores
};

// What the producer tells the consumers of a block of keys.
struct KeyBlock {
  int block;  // of its sequence; < 0: no more work
  int head;   // of the pair, among `parts` for each head of k and v
  int batch;
  int state;  // bits of KeyBlockState
};
enum KeyBlockState : int {
  kHasSteps = 1,   // some row sees its keys in this wave
  kCarryIn = 2,    // an earlier wave has left sums, or the first part of its rows
  kCarryOut = 4,   // a later wave wants them, the second part of its rows, or sm90/backward/reduce.cu
  kNextBehind = 8,  // the next block that is taken of its pair has the keys after its own, not those in front
  kFirstPart = 16,  // it is the first part of its rows: second parts wait until its sums are there
};

// And of a step: a tile of rows of a q head.
struct Step {
  int tile;   // of dS; with sums: of rows, among the statistics of all heads
  int row;    // its first
  int slope;  // the bits of ALiBi's
  int state;  // bits of StepState
};
enum StepState : int {
  kMasked = 1,
  kLastStep = 2,
  kHeadOfPair = 4,   // times the q head's number in its pair, kDropout
};

// And of a unit of dQ that a buffer of sums holds.
struct SumUnit {
  int unit;  // among those of all heads; < 0: no more work
  int turn;  // the block that it is of
  int next;  // the block that adds next, kOrdered
  int bytes;
};

// Bytes of buffers, and byte offsets from a base aligned to 1024.
struct KeysLayout {
  int k_bytes, v_bytes, q_bytes, o_bytes, p_bytes, ds_bytes;  // ds_bytes: of 64 keys
  int k, v, q, o, p, ds, sums;
  int shift, delta;  // statistics of a tile of rows with each buffer of q and o
  int step, ds_step;  // a Step with each buffer of q, and of dS
  int block;         // a KeyBlock with each buffer of k
  int sum_unit;      // a SumUnit with each buffer of sums
  int k_full, k_empty, v_full, v_empty, q_full, q_empty, o_full, o_empty, tail;
  int dropout_key;
  int bytes;
};

// A map with so many panels of K and of V, and so many buffers of P.
FULGUR_SHARED KeysLayout keys_layout_of(const BackwardTile& tile, int k_panels, int v_panels, int p_stages) {
  KeysLayout map = {};
  map.k_bytes = k_panels * tile.block_keys * 128;
  map.v_bytes = v_panels * tile.block_keys * 128;
  map.q_bytes = panels_of_columns(tile.head_dim) * tile.block_rows * 128;
  map.o_bytes = panels_of_columns(tile.value_dim) * tile.block_rows * 128;
  map.p_bytes = 2 * tile.block_rows * tile.block_keys;
  map.ds_bytes = tile.block_rows / kPieceRows * kPieceBytes;
  map.k = 0;
  map.v = map.k + tile.k_stages * map.k_bytes;
  map.q = map.v + map.v_bytes;
  map.o = map.q + tile.q_stages * map.q_bytes;
  map.p = map.o + tile.o_stages * map.o_bytes;
  map.ds = map.p + p_stages * map.p_bytes;
  map.sums = map.ds + tile.ds_stages * (tile.block_keys / kPieceKeys) * map.ds_bytes;
  map.shift = map.sums + tile.sums_stages * 4 * kUnitFloats;
  map.delta = map.shift + 4 * tile.block_rows * tile.q_stages;
  map.step = map.delta + 4 * tile.block_rows * tile.o_stages;
  map.ds_step = map.step + int(sizeof(Step)) * tile.q_stages;
  map.block = map.ds_step + int(sizeof(Step)) * tile.ds_stages;
  map.sum_unit = map.block + int(sizeof(KeyBlock)) * tile.k_stages;
  map.k_full = map.sum_unit + int(sizeof(SumUnit)) * tile.sums_stages;
  map.k_empty = map.k_full + 8 * tile.k_stages;
  map.v_full = map.k_empty + 8 * tile.k_stages;
  map.v_empty = map.v_full + 8;
  map.q_full = map.v_empty + 8;
  map.q_empty = map.q_full + 8 * tile.q_stages;
  map.o_full = map.q_empty + 8 * tile.q_stages;
  map.o_empty = map.o_full + 8 * tile.o_stages;
  map.tail = map.o_empty + 8 * tile.o_stages;
  map.dropout_key = map.tail + 8;
  map.bytes = map.dropout_key + 8;
  return map;
}

// Of sm90/backward/keys.cu: P does not leave its registers.
FULGUR_SHARED KeysLayout keys_layout(const BackwardTile& tile) {
  return keys_layout_of(tile, panels_of_columns(tile.head_dim), panels_of_columns(tile.value_dim), 0);
}

// Of sm90/backward/keys_wide.cu: two buffers of P, and of K and V what registers do not hold.
FULGUR_SHARED KeysLayout keys_wide_layout(const BackwardTile& tile) {
  return keys_layout_of(tile, panels_of_columns(tile.head_dim) - panels_in_registers(tile.head_dim),
                        panels_of_columns(tile.value_dim) - panels_in_registers(tile.value_dim), 2);
}

// What the producer tells the consumers of sm90/backward/rows.cu of a block of rows.
struct RowBlock {
  int row;  // its first; < 0: no more work
  int head, batch;
  int steps;  // tiles of 64 keys
};

struct RowsLayout {
  int ds_bytes, k_bytes, stage_bytes;
  int stages;  // pieces of dS, then K
  int block;   // a RowBlock
  int full, empty, block_full, block_empty, tail;
  int bytes;
};

FULGUR_SHARED RowsLayout rows_layout(const BackwardTile& tile) {
  RowsLayout map = {};
  map.ds_bytes = tile.consumers * tile.row_tiles * kPieceBytes;
  map.k_bytes = panels_of_columns(tile.head_dim) * kBackwardPanelBytes;
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
