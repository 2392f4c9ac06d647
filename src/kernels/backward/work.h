// How the backward pass divides its work. The scores of a q head are cut into score tiles of Br x Bc. A kernel by keys
// computes key blocks of Bc keys and iterates over the row tiles of Br rows that see them. It computes dK and dV, and
// either adds dQ to dq_accum or, on Hopper only, stores dS, from which the kernel by rows (sm90/backward/rows.cu)
// computes dQ = dS K. If dS of a call does not fit the workspace, the call is divided into waves, whose dS fits. A call
// may request dQ alone, or dK and dV.
#pragma once
#include "host_device/mask.h"

namespace fulgur::kernels {

// How dQ is computed.
enum class DqMethod : int {
  kAtomic,   // key blocks add to dq_accum in f32, in no fixed order
  kOrdered,  // the same in a fixed order, by semaphores: the same bits in every run
  kStored,   // dS is stored, and the kernel by rows computes dQ from it
  kNone,     // dQ is not requested
  kByRows,   // a kernel by rows computes P and dS again
};

// A dS tile is dS of 64 rows x 64 keys: one line of 128 bytes for each key, with its rows swizzled as TMA does it.
enum : int { kDsTileRows = 64, kDsTileKeys = 64, kDsTileBytes = 2 * kDsTileRows * kDsTileKeys };
// The statistics of a sequence (LSE and D of its rows) begin at a multiple of this number of rows.
enum : int { kStatisticsRows = 128 };

enum : int {
  kDqTileFloats = 64 * 64,  // of a dQ tile: 64 rows of a panel
  // A flag of a semaphore: no key block has added to its part of dQ yet, so the first one stores instead.
  kFirstToAdd = 1 << 30,
};
// dQ is accumulated by panels of 64 columns of f32.
FULGUR_SHARED int dq_panels_of(int head_dim) { return (head_dim + 63) / 64; }

// The size of a score tile, Br x Bc.
struct ScoreTile {
  int rows, keys;  // on Hopper multiples of 64, and keys / rows is 1 or 2
};

// x / y for a y that is 1 in most calls: a division by a run-time value takes about a hundred cycles, which nothing
// hides before the first load of a key block.
FULGUR_SHARED int quotient(int x, int y) { return y == 1 ? x : x / y; }

FULGUR_SHARED int count_of(int all, int each) { return (all + each - 1) / each; }

// The part of a call that one launch of the kernel by keys computes: heads, sequences, and row tiles of each sequence.
// A head is a kv head with all of its q heads, or one of the splits of a kv head.
struct Wave {
  int first_head, heads;
  int first_batch, batches;
  int first_tile, tiles;  // row tiles

  friend FULGUR_SHARED bool operator==(const Wave&, const Wave&) = default;
};

// The order in which the blocks of a head are taken. Alternating: descending in even sections, ascending in odd ones.
enum BlockOrder : int { kAscending, kDescending, kAlternating };

// The order in which CTAs take the blocks of all heads of all sequences. The heads of all sequences (batch_heads) are
// numbered by sections of consecutive ones, as in host_device/work_tiles.h: inside a section blocks are outermost and
// heads innermost, so that the CTAs that run at the same time share the rows of few heads in L2.
struct BlockSchedule {
  int blocks;         // of a head
  int batch_heads;    // batch * heads
  int section_heads;  // heads of a section
  int sections;       // the last one takes the remainder, too
  BlockOrder order;

  friend FULGUR_SHARED bool operator==(const BlockSchedule&, const BlockSchedule&) = default;
};
struct BlockOfHead {
  int block, batch_head;
};

// Whether the blocks of a head are taken in ascending order.
FULGUR_SHARED bool is_ascending(const BlockSchedule& blocks, int batch_head) {
  if (blocks.order != kAlternating) return blocks.order == kAscending;
  if (blocks.sections == 1) return false;
  return min_of(batch_head / blocks.section_heads, blocks.sections - 1) % 2 == 1;
}

FULGUR_SHARED int section_of(const BlockSchedule& blocks, int number) {
  return blocks.sections == 1 ? 0 : min_of(number / (blocks.blocks * blocks.section_heads), blocks.sections - 1);
}

FULGUR_SHARED BlockOfHead block_of(const BlockSchedule& blocks, int number) {
  const int section = section_of(blocks, number);
  const int first = section * blocks.section_heads;
  const int heads = section == blocks.sections - 1 ? blocks.batch_heads - first : blocks.section_heads;
  const int rest = number - first * blocks.blocks;
  const int block = rest / heads;
  const int batch_head = first + rest % heads;
  return {is_ascending(blocks, batch_head) ? block : blocks.blocks - 1 - block, batch_head};
}

// Work tiles of the kernel by keys, numbered in the order in which CTAs take them. A work tile is a key block with all
// of its row tiles; each of the last `cut` key blocks is two work tiles: its first row tiles and the rest. The first
// parts come before all other work tiles, each longer than the previous one, and the second parts after them. So CTAs
// that start with first parts of different lengths end at the same time.
FULGUR_SHARED int work_tiles_of(const BlockSchedule& blocks, int cut) {
  return blocks.blocks * blocks.batch_heads + cut;
}

FULGUR_SHARED bool is_first_part(int cut, int work_tile) { return work_tile < cut; }
FULGUR_SHARED bool is_second_part(const BlockSchedule& blocks, int cut, int work_tile) {
  return work_tile >= work_tiles_of(blocks, cut) - cut;
}

// The number of a work tile's key block.
FULGUR_SHARED int block_number(const BlockSchedule& blocks, int cut, int work_tile) {
  return is_first_part(cut, work_tile) ? work_tiles_of(blocks, cut) - 2 * cut + work_tile : work_tile - cut;
}

// The row tiles of a work tile, where its key block has row tiles [0, tiles). First parts are never empty.
FULGUR_SHARED RowTiles row_tiles_of_work_tile(const BlockSchedule& blocks, int cut, int work_tile, int tiles) {
  const bool first = is_first_part(cut, work_tile);
  if (!first && !is_second_part(blocks, cut, work_tile)) return {0, tiles};
  const int nth = first ? work_tile : work_tile - (work_tiles_of(blocks, cut) - cut);
  const int between = count_of(tiles * (nth + 1), cut + 1);
  return first ? RowTiles{0, between} : RowTiles{between, tiles};
}

// The places of dS of score tiles in the workspace. A row tile has memory for `pitch` score tiles. If pitch is 0, only
// a right bound hides keys, and a row tile has memory for the score tiles up to its diagonal.
struct ScoreTiles {
  int pitch;
  int head_tiles;  // score tiles of a q head of one sequence; compact: of a q head of all sequences
  bool compact;    // packed sequences of a q head are contiguous

  friend FULGUR_SHARED bool operator==(const ScoreTiles&, const ScoreTiles&) = default;
};

// The sum over i = 1 ... x of min(ceil(i / each), limit).
FULGUR_SHARED long long sum_of_quotients(long long x, int each, int limit) {
  const long long rising = x < 0 ? 0 : x < (long long)(each) * limit ? x : (long long)(each) * limit;
  const long long whole = rising / each;
  return each * whole * (whole + 1) / 2 + rising % each * (whole + 1) + (x > rising ? (x - rising) * limit : 0);
}

// The number of score tiles before row tile `tile` of a sequence under a right bound.
FULGUR_SHARED long long tiles_above_diagonal(const Band& band, const Lengths& n, const ScoreTile& each, int tile) {
  const int ahead = diagonal_of(band, n, 0) + band.right;  // keys that a row before row 0 would see
  const int start = ahead > 0 ? count_of(ahead, each.rows) : -(-ahead / each.rows);
  const int ratio = each.keys / each.rows;
  const int limit = count_of(n.sk, each.keys);
  return sum_of_quotients(start + tile, ratio, limit) - sum_of_quotients(start, ratio, limit);
}

// The number of score tiles before row tile `tile` of a sequence.
FULGUR_SHARED long long tiles_before(const ScoreTiles& store, const Band& band, const Lengths& n,
                                     const ScoreTile& each, int tile) {
  return store.pitch > 0 ? (long long)(store.pitch) * tile : tiles_above_diagonal(band, n, each, tile);
}

// The key tiles [begin, end) that some row of a row tile sees.
FULGUR_SHARED KeyTiles key_tiles_of(const Band& band, const Lengths& n, const ScoreTile& each, int tile) {
  const int row = tile * each.rows;
  return key_tiles(band, n, each.keys, row, min_of(row + each.rows, n.sq) - 1);
}

// The place of the score tile of a row tile and a key tile that it sees. `head` counts the q heads of the wave.
FULGUR_SHARED long long score_tile(const ScoreTiles& store, const Wave& wave, const Band& band, const Lengths& n,
                                   const ScoreTile& each, int split_heads, int batch, int head, int tile,
                                   int key_tile) {
  const int heads = wave.heads * split_heads;
  const long long batch_head = store.compact ? head : (long long)(batch - wave.first_batch) * heads + head;
  const int sequence = store.compact ? (n.q_start / kStatisticsRows + batch) * (kStatisticsRows / each.rows) : 0;
  const long long before =
      tiles_before(store, band, n, each, tile) - tiles_before(store, band, n, each, wave.first_tile);
  const int slot = key_tile - (store.pitch > 0 ? key_tiles_of(band, n, each, tile).begin : 0);
  return batch_head * store.head_tiles + (long long)(sequence) * store.pitch + before + slot;
}

// The first row of a sequence in the statistics of a q head.
FULGUR_SHARED int statistics_row(const Lengths& n, bool packed, int batch, int longest) {
  return packed ? (n.q_start / kStatisticsRows + batch) * kStatisticsRows
                : batch * count_of(longest, kStatisticsRows) * kStatisticsRows;
}

}  // namespace fulgur::kernels
